"""Triton's settings of logs and traces: what they are here, and which of them may be changed."""

import logging
from collections.abc import Mapping

from fornax.config import ServingCode, ServingError
from fornax.serving.v2.datatypes import refuse

__all__ = ["log_settings", "trace_settings", "update_log_settings", "update_trace_settings"]

_LEVELS = {
    "log_error": logging.ERROR,
    "log_warning": logging.WARNING,
    "log_info": logging.INFO,
}
LogSettings = dict[str, bool | int | str]
TraceSettings = dict[str, str | list[str]]

_FIXED = ("log_file", "log_format")


def _logger() -> logging.Logger:
    return logging.getLogger("fornax")


def log_settings() -> LogSettings:
    """What is logged now."""
    logger = _logger()
    return {
        "log_file": "",
        **{name: logger.isEnabledFor(level) for name, level in _LEVELS.items()},
        "log_verbose_level": int(logger.isEnabledFor(logging.DEBUG)),
        "log_format": "default",
    }


def update_log_settings(changes: Mapping[str, object]) -> LogSettings:
    """Log more or less; what is logged from now on.

    Raises ServingError for a setting that is not known, or that is fixed when the server starts.
    """
    settings = log_settings()
    for name, value in changes.items():
        if name not in settings:
            raise refuse(f"{name[:80]!r} is not a setting of the log; it has {', '.join(settings)}")
        if name in _FIXED:
            if value not in (settings[name], None):
                raise ServingError(
                    ServingCode.UNIMPLEMENTED,
                    f"{name} is fixed when the server starts; the log goes to its standard error",
                )
        elif name == "log_verbose_level":
            if type(value) is not int or not 0 <= value < 2**32:
                raise refuse(f"log_verbose_level={repr(value)[:40]} is not an integer from 0")
            settings[name] = value
        elif type(value) is not bool:
            raise refuse(f"{name}={repr(value)[:40]} is not a truth value")
        else:
            settings[name] = value
    wanted = [bool(settings[name]) for name in _LEVELS]
    if sorted(wanted, reverse=True) != wanted:
        raise refuse(
            "what is worse than a logged line is logged too: log_info needs log_warning, which "
            "needs log_error"
        )
    level = logging.CRITICAL
    for name, value in _LEVELS.items():
        level = value if settings[name] else level
    if settings["log_verbose_level"]:
        level = logging.DEBUG
    _logger().setLevel(level)
    return log_settings()


def trace_settings(sample_rate: float = 0.0) -> TraceSettings:
    """How requests are traced: `sample_rate` of them, by OpenTelemetry; 0: none."""
    return {
        "trace_level": ["TIMESTAMPS"] if sample_rate else ["OFF"],
        "trace_rate": str(round(1 / sample_rate)) if sample_rate else "0",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "opentelemetry",
    }


def update_trace_settings(changes: Mapping[str, object], sample_rate: float = 0.0) -> TraceSettings:
    """Refused, unless it changes nothing: traces are set up when the server starts."""
    settings = trace_settings(sample_rate)
    for name, value in changes.items():
        if name not in settings:
            raise refuse(f"{name[:80]!r} is not a setting of traces; it has {', '.join(settings)}")
        if value is not None and value != settings[name]:
            raise ServingError(
                ServingCode.UNIMPLEMENTED,
                f"{name} is fixed when the server starts, by trace_endpoint and trace_sample_rate",
            )
    return settings
