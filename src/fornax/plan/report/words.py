"""Figures as a reader wants them: binary sizes, decimal rates, short source lines."""

import re

__all__ = [
    "argument",
    "count",
    "nbytes",
    "operation",
    "rate",
    "seconds",
    "shorten",
    "sides",
    "where",
]

GIB = 1 << 30
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_ABOVE = re.compile(r"^\S*(?:src|site-packages)/(?:fornax/)?")
_FRAMES = re.compile(
    r"\b(?:jit|jvp|transpose|checkpoint|remat\w*|while|body|closed_call|shard_map)\b"
)


def nbytes(value: float) -> str:
    """Bytes in binary units, three figures: 95.0 GiB, 512 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1000 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{_three(value)} {unit}"


def count(value: float, unit: str = "") -> str:
    """A number in decimal units, three figures: 8.03 G, 459 TFLOP/s."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    for prefix in _PREFIXES:
        if value < 999.5 or prefix == _PREFIXES[-1]:
            break
        value /= 1000
    shown = f"{value:.0f}" if prefix == "" and value == int(value) else _three(value)
    return f"{sign}{shown} {prefix}{unit}".rstrip()


def rate(flops_per_second: float) -> str:
    """FLOP/s."""
    return count(flops_per_second, "FLOP/s")


def seconds(value: float) -> str:
    """A time: 35.2 us, 8.30 ms, 5.10 s, 3.2 min, 1.4 h, 12 days."""
    for limit, factor, unit in (
        (1e-3, 1e6, "us"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
        (172_800.0, 1 / 3600, "h"),
    ):
        if abs(value) < limit:
            return "0 s" if value == 0 else f"{_three(value * factor)} {unit}"
    return f"{_three(value / 86_400)} days"


def _three(value: float) -> str:
    """Three figures, thousands with a comma."""
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}"


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the middle makes room, so that both ends can be read."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    if width < 8:
        return text[:width]
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def where(source: str) -> str:
    """A source line without the folders above the package."""
    return _ABOVE.sub("", source).removeprefix("fornax/")


def operation(op_name: str) -> str:
    """The end of an operation's name, without the frames that tracing puts around everything."""
    parts = [part for part in op_name.split("/") if part and not _FRAMES.match(part)]
    return "/".join(parts[-3:]) or op_name


def argument(path: str) -> str:
    """An argument's path as names with slashes: state.params['mlp']['up'] is params/mlp/up."""
    plain = re.sub(r"\['?([^'\]]*)'?\]", r"/\1", path)
    return plain.removeprefix("state.").removeprefix("state/").replace(".", "/")


def sides(axes: tuple[str, ...]) -> str:
    """Mesh axes as a reader writes them; an exchange over none is one inside a device."""
    return " x ".join(axes) or "none"
