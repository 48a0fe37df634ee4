"""What `fornax kernels` prints: the table of support, one operation, measured calls."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fornax import kernels
from fornax.mesh.hardware import Chip
from fornax.plan.kernels.measure import Measurement

__all__ = [
    "NOTE",
    "described",
    "limit_seconds",
    "list_text",
    "measured_text",
    "operation_text",
    "support_rows",
]

_PLATFORMS = ("cpu", "tpu", "gpu")
NOTE = (
    "tested: its numbers are compared with a reference there; compiled: by the TPU's compiler, "
    "never run; lowered: for CUDA, never compiled or run; -: declines"
)


def support_rows() -> list[tuple[str, ...]]:
    """The table of support: operation, implementation, then a word for each platform."""
    return [
        (name, _title(one), *(one.support.get(platform, "-") for platform in _PLATFORMS))
        for name, operation in kernels.operations().items()
        for one in operation.implementations
    ]


def _title(one: kernels.Implementation[Any]) -> str:
    return f"{one.name} (deprecated: use {one.deprecated})" if one.deprecated else one.name


def list_text() -> str:
    """Every implementation of every operation, and where it is supported."""
    head = ("operation", "implementation", *_PLATFORMS)
    return "\n".join([*_aligned([head, *support_rows()]), "", NOTE])


def operation_text(name: str) -> str:
    """An operation: its implementations in order, and what was measured of it on this machine.

    Raises:
      KernelError: there is no such operation.
    """
    operation = kernels.operations().get(name)
    if operation is None:
        known = ", ".join(kernels.operations())
        raise kernels.KernelError(f"there is no operation {name!r}; use one of: {known}")
    head = ("implementation", *_PLATFORMS)
    rows = [row[1:] for row in support_rows() if row[0] == name]
    lines = [f"{name}: implementations in order of preference", *_aligned([head, *rows])]
    found = kernels.kept(name)
    if not found:
        return "\n".join([*lines, "", "nothing of it was measured on this machine"])
    lines += ["", "measured on this machine"]
    for one in found:
        lines.append(described(one.call))
        lines += _aligned(
            (f"  {each}", _time(seconds), "chosen" if each == one.chosen else "")
            for each, seconds in sorted(one.seconds.items(), key=lambda pair: pair[1])
        )
        lines += [f"  {each}: failed: {why}" for each, why in one.failures.items()]
    return "\n".join(lines)


def limit_seconds(measured: Measurement, chip: Chip) -> float | None:
    """The least time the chip could take, by its FLOP/s or by its memory; None: not counted."""
    if not measured.bytes:
        return None
    rate = chip.peak_flops.get(measured.dtype)
    products = measured.flops / rate if rate else 0.0
    return max(products, measured.bytes / chip.memory_bandwidth)


def measured_text(measured: Measurement, chip: Chip) -> str:
    """A call and the time of each implementation, with its share of the limit."""
    limit = limit_seconds(measured, chip)
    rows = [
        (
            f"  {name}",
            _time(seconds),
            "" if limit is None else f"{limit / seconds:.0%} of the limit",
            "fastest" if name == measured.fastest else "",
            "chosen before" if name == measured.call.chosen else "",
        )
        for name, seconds in sorted(measured.seconds.items(), key=lambda pair: pair[1])
    ]
    lines = [f"{measured.call.operation}  {described(measured.call.fields)}", *_aligned(rows)]
    lines += [f"  {name}: failed: {why}" for name, why in measured.failures.items()]
    lines += [f"  {name}: declines: {why}" for name, why in measured.declined.items()]
    return "\n".join(lines)


def described(fields: Mapping[str, Any]) -> str:
    """The fields of a call that say something."""
    plain = {name: value for name, value in fields.items() if value not in (None, False)}
    return " ".join(name if value is True else f"{name}={value}" for name, value in plain.items())


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    filled = list(rows)
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    for row in filled:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
