"""Times, sizes and rates as a user writes them: 25000h, 1.2TB, 2GB/s."""

import math
import re
from collections.abc import Mapping

from fornax.config.errors import ConfigError

__all__ = ["parse_bytes", "parse_rate", "parse_time"]

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {
    prefix + unit: base**power
    for base, unit in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate(("", "k" if base == 1000 else "K", "M", "G", "T", "P"))
    if prefix or unit == "B"
}


def parse_time(name: str, text: str) -> float:
    """Seconds of a time such as 12s, 25000h or 1.5min; ConfigError for anything else, and for 0."""
    return _parse(name, text, "time", _SECONDS)


def parse_bytes(name: str, text: str) -> float:
    """Bytes of a size such as 1.2TB or 300GiB; ConfigError for anything else, and for 0."""
    return _parse(name, text, "size", _BYTES)


def parse_rate(name: str, text: str) -> float:
    """Bytes/s of a rate such as 2GB/s; ConfigError for anything else, and for 0."""
    return _parse(name, text, "rate", {f"{unit}/s": size for unit, size in _BYTES.items()})


def _parse(name: str, text: str, what: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z/]+)", text.strip())
    value = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{name}={text!r} is no {what} above 0; write a number and its unit, one of "
            f"{', '.join(units)}"
        )
    return value
