"""Which parallelism each part of Fornax has: one table for code, errors and documentation.

Which kernels run on which device is a table of its own: the implementations of `fornax.kernels`.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fornax.config.errors import ConfigError

__all__ = ["MESH_AXES", "USES", "AxisSupport", "axes_table", "check_axes", "supported_axes"]

USES = ("train", "tune", "plan", "preflight", "serve")
"""The commands that divide arrays over a mesh, with what they are built of."""

_TRAINER = ("train", "tune", "plan", "preflight")


class AxisSupport(NamedTuple):
    """One axis of the mesh."""

    divides: str
    """What it divides."""
    uses: tuple[str, ...]
    """Which of `USES` can give it a size above 1."""
    instead: str = ""
    """What to do where nothing can."""


_AXES: Mapping[str, AxisSupport] = {
    "slice": AxisSupport("the batch, between slices of TPUs", _TRAINER),
    "data": AxisSupport("the batch; parameters are on every device", _TRAINER),
    "stage": AxisSupport("layers, into pipeline stages", (), "give its devices to mesh.fsdp"),
    "fsdp": AxisSupport("the batch, parameters and optimizer state", _TRAINER),
    "expert": AxisSupport("experts of a mixture", (), "give its devices to mesh.fsdp"),
    "context": AxisSupport("the length of rows", _TRAINER),
    "tensor": AxisSupport("heads, widths and vocabulary", USES),
}

MESH_AXES = tuple(_AXES)
"""Mesh axes from the slowest link to the fastest."""


def supported_axes() -> tuple[str, ...]:
    """The axes that something can give a size above 1."""
    return tuple(axis for axis, support in _AXES.items() if support.uses)


def check_axes(sizes: Mapping[str, int], rules: Mapping[str, Iterable[str]]) -> None:
    """Refuse an axis that nothing would divide anything over.

    Args:
      sizes: mesh axis to its size; -1 for what is left.
      rules: logical axis to mesh axes, as the user wrote them.

    Raises:
      ConfigError: naming the axis, and what to do instead.
    """
    usable = ", ".join(supported_axes())
    for axis, support in _AXES.items():
        if support.uses:
            continue
        naming = [logical for logical, axes in rules.items() if axis in axes]
        if sizes[axis] == 1 and not naming:
            continue
        given = f"mesh.{axis}={sizes[axis]}" if sizes[axis] != 1 else f"mesh.rules.{naming[0]}"
        raise ConfigError(
            f"{given}: the axis {axis!r} ({support.divides}) is not implemented, and its devices "
            f"would repeat each other's work; {support.instead}, or use one of: {usable}"
        )


def axes_table() -> list[tuple[str, ...]]:
    """Rows of the documentation's table: axis, what it divides, then yes or no for each use."""
    return [
        (f"`{axis}`", each.divides, *("yes" if use in each.uses else "no" for use in USES))
        for axis, each in _AXES.items()
    ]
