"""Transfers between devices: what they move, between whom, along which mesh axes.

A program for several slices is compiled for one of them: its groups count the devices of a slice,
and what crosses slices are pairs of `send` and `recv` that name the slices and the reduction. They
become a collective whose groups hold one device of each slice, of a permutation of the two slices
of a pair.

A number in a group is the position of a device in `mesh.devices.flat`.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from fornax.hlo.facts import CollectiveKind
from fornax.hlo.module import Instruction
from fornax.hlo.shapes import HOST, largest_dtype, leaves, numbers
from fornax.hlo.traffic import transfer_ends

_KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "all-gather",
    "send": "send-recv",
}
_ACROSS: dict[str, CollectiveKind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"\{([\d,\s]*)\}")
_MESH = re.compile(r"@?mesh\w*[<\[]+([^\]>]*)[\]>]+(?:, device_ids=\(([^{]*)\))?\s*\{([^{}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"[\"']?(\w+)[\"']?\s*=\s*(\d+)")
_PART = re.compile(r"[\"']?(\w+)[\"']?(?::\((\d+)\)(\d+))?")
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIR = re.compile(r"\{(\d+)\d{5}->(\d+)\d{5}\}")
"""Slices of a pair of a permutation; the rest numbers chips, and not as the mesh does."""
_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))')


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What one collective moves; see `facts.Collective` for the meaning of `bytes`."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    group_size: int
    bytes: int
    dtype: str
    note: str = ""


def collective_kind(instruction: Instruction) -> CollectiveKind | None:
    """Return what kind of transfer an instruction is or starts; None for all else."""
    return _KINDS.get(instruction.opcode.removesuffix("-start"))


def transfer(instruction: Instruction, axes: Mapping[str, int], *, fused: bool = False) -> Transfer:
    """Describe a collective, or a copy between the device and its host.

    In a fusion (`fused`) an all-reduce of which only a slice is kept is a reduce-scatter.
    """
    copied = host_transfer(instruction)
    if copied:
        dtype = largest_dtype([instruction.shape])
        return Transfer("host-transfer", (), (), 1, copied, dtype)
    attributes = instruction.attributes
    devices = math.prod(axes.values())
    # Of a slice, where there are several.
    local = min(int(instruction.module.header.get("num_partitions", devices)), devices)
    given = [operand.shape for operand in instruction.operands]
    kind = _KINDS[instruction.opcode.removesuffix("-start")]
    if kind == "all-reduce" and fused and _keeps_a_part(instruction):
        kind = "reduce-scatter"
    if kind == "send-recv":
        given = given[:1]
        across = _TYPE.search(instruction.rest)
        kind = _ACROSS.get(across.group(1), kind) if across else kind
        groups = _across_slices(instruction, local, devices)
    elif kind == "collective-permute":
        groups = parse_pairs(attributes.get("source_target_pairs", ""))
    else:
        groups = parse_groups(attributes.get("replica_groups", ""), local)
    spanned: tuple[str, ...] | None = ()
    note, size = "", local
    if groups is None:
        note = f"{instruction.name}: groups {attributes.get('replica_groups')!r} not understood"
        groups = np.zeros((0, 0), int)
    else:
        spanned = spanned_axes(groups, axes)
        size = groups.shape[1] if groups.size else 1
        if spanned is None:
            note = f"{instruction.name}: its groups name devices that the mesh has not"
    if instruction.opcode.startswith("ragged-all-to-all"):
        # The rows and their place, of which one has room for the worst case; then numbers.
        given = [min(given[:2], key=lambda shape: shape.unpadded_bytes)]
    moved = sum(shape.unpadded_bytes for shape in given)
    if kind == "collective-permute" and not groups.size:  # all of its pairs cross slices
        moved = 0
    if kind in ("all-gather", "all-to-all"):
        moved *= size
    return Transfer(
        kind,
        spanned or (),
        tuple(map(tuple, groups.tolist())),
        size,
        moved,
        largest_dtype(given),
        note,
    )


def host_transfer(instruction: Instruction) -> int:
    """Return the bytes that an instruction copies between the device and its host, 0 for none."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return 0
    moved, ends = transfer_ends(instruction)
    spaces = [leaves(end)[0].space for end in ends]
    return moved.unpadded_bytes if (spaces[0] == HOST) != (spaces[1] == HOST) else 0


def _keeps_a_part(instruction: Instruction) -> bool:
    """Tell whether all that is used of an array is a slice."""
    return bool(instruction.users) and all(
        user.opcode == "dynamic-slice"
        or (user.opcode in ("bitcast", "reshape", "get-tuple-element") and _keeps_a_part(user))
        for user in instruction.users
    )


def _across_slices(instruction: Instruction, local: int, devices: int) -> np.ndarray | None:
    """Return groups of one device a slice: those of `{1,2}x{0:3}`, slices counted from 1, and of a
    permutation from chip 3 of slice 1 to chip 0 of slice 2, `{{100003->200000}}`, those of 1 and 2.
    """
    slices = max(devices // local, 1)
    found = _TARGET.search(instruction.rest)
    target = (found.group(1) or found.group(2)) if found else ""
    listed = [",".join(pair) for pair in dict.fromkeys(_PAIR.findall(target))]
    listed = listed or re.findall(r"\{([\d,]+)\}", target)
    members = [[int(n) - 1 for n in part.split(",")] for part in listed]
    if not members or any(not 0 <= n < slices for group in members for n in group):
        members = [list(range(slices))]
    if len({len(group) for group in members}) != 1:
        return None
    groups = [[n * local + k for n in group] for group in members for k in range(local)]
    return np.array(groups)


def parse_groups(text: str, devices: int) -> np.ndarray | None:
    """Return the groups [G, S] of `replica_groups=…` in any printed form, None if not understood.

    An empty list means one group of all devices.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return np.arange(devices).reshape(1, -1)
    iota = _IOTA.fullmatch(text)
    if iota:
        shape, dims, order = (numbers(part or "") for part in iota.groups())
        return _iota(dims, order).reshape(shape)
    if text.startswith("{{"):
        rows = [numbers(row) for row in _LIST.findall(text)]
        if len({len(row) for row in rows}) != 1:
            return None
        return np.array(rows)
    mesh = _MESH.search(text)
    return _groups_of_axes(*mesh.groups()) if mesh else None


def parse_pairs(text: str) -> np.ndarray:
    """Return `source_target_pairs` as [P, 2]."""
    return np.array([numbers(row) for row in _LIST.findall(text)], int).reshape(-1, 2)


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
        return _iota(numbers(iota.group(1)), numbers(iota.group(2) or "")).ravel()
    listed = re.fullmatch(r"[\[{]?([\d,\s]+)[\]}]?", order.strip())
    ids = np.array(numbers(listed.group(1))) if listed else np.zeros(0, int)
    return ids if ids.size == count else None


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
