"""Transfers between devices: what they move, between whom, along which mesh axes.

A program for several slices is compiled for one of them: its groups count the devices of a slice,
and what crosses slices are pairs of `send` and `recv` that name the slices and the reduction. They
become a collective whose groups hold one device of each slice.
"""

import dataclasses
import math
import re

import numpy as np

from fornax.plan.hlo.facts import CollectiveKind
from fornax.plan.hlo.groups import parse_groups, parse_pairs, spanned_axes
from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.operations import dtype_name
from fornax.plan.hlo.shapes import HOST, Shape, leaves

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
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="([^"]*)"')


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What one collective moves; see `facts.Collective` for the meaning of `bytes`."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    group_size: int
    bytes: int
    dtype: str
    channel: int | None
    note: str = ""


def collective_kind(instruction: Instruction) -> CollectiveKind | None:
    """Return what kind of transfer an instruction is or starts; None for all else."""
    return _KINDS.get(instruction.opcode.removesuffix("-start"))


def transfer(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    axes: dict[str, int],
    *,
    fused: bool = False,
) -> Transfer:
    """Describe a collective.

    In a fusion (`fused`) an all-reduce of which only a slice is kept is a reduce-scatter.
    """
    attributes = instruction.attributes
    devices = math.prod(axes.values())
    # Of a slice, where there are several.
    local = min(int(module.header.get("num_partitions", devices)), devices)
    given = [operand.shape for operand in computation.operands(instruction)]
    kind = _KINDS[instruction.opcode.removesuffix("-start")]
    if kind == "all-reduce" and fused and _keeps_a_part(computation, instruction):
        kind = "reduce-scatter"
    groups: np.ndarray | None
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
    moved = sum(shape.unpadded_bytes for shape in given)
    if kind in ("all-gather", "all-to-all"):
        moved *= size
    channel = attributes.get("channel_id", "")
    return Transfer(
        kind,
        spanned or (),
        tuple(tuple(int(member) for member in group) for group in groups),
        size,
        moved,
        dtype_name(_widest(given)),
        int(channel) if channel.isdigit() else None,
        note,
    )


def host_transfer(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction copies between the device and its host, 0 for none."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return 0
    operands = [operand.shape for operand in computation.operands(instruction)]
    if opcode == "dynamic-update-slice":
        moved, ends = operands[1], (operands[0], operands[1])
    else:
        moved = result_of(instruction)
        ends = (operands[0], moved)
    spaces = [leaves(end)[0].space for end in ends]
    return moved.unpadded_bytes if (spaces[0] == HOST) != (spaces[1] == HOST) else 0


def result_of(instruction: Instruction) -> Shape:
    """Return the shape of what an instruction makes; of a start, of what its done returns."""
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or shape.elements is None:
        return shape
    return shape.elements[0] if instruction.opcode == "copy-start" else shape.elements[1]


def _keeps_a_part(computation: Computation, instruction: Instruction) -> bool:
    """Tell whether all that is used of an array is a slice."""
    users = computation.users.get(instruction.name, [])
    return bool(users) and all(
        user.opcode == "dynamic-slice"
        or (
            user.opcode in ("bitcast", "reshape", "get-tuple-element")
            and _keeps_a_part(computation, user)
        )
        for user in users
    )


def _across_slices(instruction: Instruction, local: int, devices: int) -> np.ndarray | None:
    """Return groups of one device a slice: those of `{1,2}x{0:3}`, slices counted from 1."""
    slices = max(devices // local, 1)
    target = _TARGET.search(instruction.rest)
    listed = re.findall(r"\{([\d,]+)\}", target.group(1)) if target else []
    members = [[int(n) - 1 for n in part.split(",")] for part in listed]
    if not members or any(not 0 <= n < slices for group in members for n in group):
        members = [list(range(slices))]
    if len({len(group) for group in members}) != 1:
        return None
    groups = [[n * local + k for n in group] for group in members for k in range(local)]
    return np.array(groups)


def _widest(shapes: list[Shape]) -> str:
    arrays = [leaf for shape in shapes for leaf in leaves(shape)]
    return max(arrays, key=lambda leaf: leaf.unpadded_bytes).dtype if arrays else ""
