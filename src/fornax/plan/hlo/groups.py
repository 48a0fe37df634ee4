"""Who talks to whom in a collective: the groups that HLO prints, and the mesh axes they span.

A number in a group is the position of a device in `mesh.devices.flat`.
"""

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"\{([\d,\s]*)\}")
_MESH = re.compile(r"@?mesh\w*[<\[]+([^\]>]*)[\]>]+(?:, device_ids=\(([^{]*)\))?\s*\{([^{}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"[\"']?(\w+)[\"']?\s*=\s*(\d+)")
_PART = re.compile(r"[\"']?(\w+)[\"']?(?::\((\d+)\)(\d+))?")


def parse_groups(text: str, devices: int) -> np.ndarray | None:
    """Return the groups [G, S] of `replica_groups=…` in any printed form, None if not understood.

    An empty list means one group of all devices.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return np.arange(devices).reshape(1, -1)
    iota = _IOTA.fullmatch(text)
    if iota:
        shape, dims, order = (_numbers(part or "") for part in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return ids.transpose(order or range(len(dims))).reshape(shape)
    if text.startswith("{{"):
        rows = [_numbers(row) for row in _LIST.findall(text)]
        if len({len(row) for row in rows}) != 1:
            return None
        return np.array(rows)
    mesh = _MESH.search(text)
    return _groups_of_axes(*mesh.groups()) if mesh else None


def parse_pairs(text: str) -> np.ndarray:
    """Return `source_target_pairs` as [P, 2]."""
    return np.array([_numbers(row) for row in _LIST.findall(text)], int).reshape(-1, 2)


def spanned_axes(groups: np.ndarray, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes along which members of a group differ; None if ids leave the mesh."""
    if groups.size == 0:
        return ()
    if groups.max() >= math.prod(axes.values()):
        return None
    coordinates = np.unravel_index(groups, tuple(axes.values()))
    return tuple(
        name for name, along in zip(axes, coordinates, strict=True) if (along != along[:, :1]).any()
    )


def _groups_of_axes(mesh: str, order: str | None, names: str) -> np.ndarray | None:
    """Return the groups over axes of a mesh; `a:(2)4` is the part of `a` of size 4 after a 2."""
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in _PART.findall(names):
        if name not in sizes:
            return None
        parts.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    shape: list[int] = []
    wanted: list[int] = []
    for name, size in sizes.items():
        spans = parts.get(name, [])
        cuts = sorted({1, size, *itertools.chain(*((b, b * s) for b, s in spans))})
        for low, high in itertools.pairwise(cuts if size > 1 else [1, 1]):
            if any(b <= low and high <= b * s for b, s in spans):
                wanted.append(len(shape))
            shape.append(high // low)
    ids = _device_ids(order, math.prod(shape))
    if ids is None:
        return None
    kept = [n for n in range(len(shape)) if n not in wanted]
    groups = ids.reshape(shape).transpose([*kept, *wanted])
    return groups.reshape(-1, math.prod(shape[n] for n in wanted))


def _device_ids(order: str | None, count: int) -> np.ndarray | None:
    """Return the devices of a mesh in its order: by number, `[8,4]T(1,0)`, or a list."""
    if order is None:
        return np.arange(count)
    iota = _ORDER.fullmatch(order.strip())
    if iota:
        dims, turn = _numbers(iota.group(1)), _numbers(iota.group(2) or "")
        return np.arange(math.prod(dims)).reshape(dims).transpose(turn or range(len(dims))).ravel()
    listed = re.fullmatch(r"[\[{]?([\d,\s]+)[\]}]?", order.strip())
    ids = np.array(_numbers(listed.group(1))) if listed else np.zeros(0, int)
    return ids if ids.size == count else None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
