"""What the reader of a compiled program finds: operations, collectives, their order, live buffers.

Figures are those of one device and of one run of an instruction; `count` says how often a step runs
it. Bytes are those of main memory (HBM) and count the padding of tiles.
"""

import dataclasses
from typing import Literal

Category = Literal[
    "matmul", "attention", "kernel", "elementwise", "reduce", "copy", "gather", "other"
]
CollectiveKind = Literal[
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "send-recv",
    "host-transfer",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One instruction that computes or moves data on its own device."""

    name: str
    opcode: str
    category: Category
    flops: float
    """Of matrix products, convolutions and kernels; a multiplication and an addition are two."""
    vector_flops: float
    """Of elementwise arithmetic and reductions, one per element."""
    transcendentals: float
    """Exponentials, logarithms, roots and their like, one per element."""
    bytes: int
    """Read from and written to HBM; what stays in the chip's own vector memory is not counted."""
    dtype: str
    """Of the product's operands, else of the result: "bfloat16", "float32", "int8", "float8"…"""
    count: float
    """Of a loop with an unknown trip count as of one that runs once."""
    op_name: str
    source: str
    """The line that asked for it, in a model or a user's file: "fornax/models/layers.py:88 (f)"."""
    fornax_source: str
    """Innermost line in fornax, kernels included; empty when none is on the stack."""
    cycles: float | None
    """The compiler's own estimate, where it prints one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One transfer between devices, or between a device and its host."""

    name: str
    kind: CollectiveKind
    axes: tuple[str, ...]
    """Mesh axes that its groups span, in the mesh's order."""
    groups: tuple[tuple[int, ...], ...]
    """Positions in `mesh.devices.flat`; for a permutation, pairs of source and target."""
    group_size: int
    bytes: int
    """Of the whole gathered or reduced array of a group; of the sent array for a permutation; of
    the operands of one device for an all-to-all times the group's size. No padding of tiles."""
    dtype: str
    count: float
    op_name: str
    source: str
    fornax_source: str
    argument: str = ""
    """The argument of the program that it moves, if that is all that was done to it before:
    `state.params['layers']['mlp']['up']['kernel']`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """An operation, or a collective that nothing overlaps."""

    what: Operation | Collective


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """An operation or collective that runs beside what follows, until the `Done` with its name."""

    what: Operation | Collective


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The end of what `Start` began."""

    what: Operation | Collective


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A computation that runs `count` times in a row: a while's body, a branch, a call."""

    name: str
    kind: Literal["while", "conditional", "call"]
    count: float
    """Of one visit; the `count` of what is inside multiplies all loops around it."""
    exact: bool
    body: tuple["Item", ...]


Item = Run | Start | Done | Loop


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Memory that one value takes at the peak."""

    name: str
    """The instruction that makes it; an index follows for a part of a tuple: "fusion.3{1}"."""
    bytes: int
    unpadded_bytes: int
    shape: str
    op_name: str
    """Of an entry parameter its name in the arguments: `state.params['embed']['embedding']`."""
    source: str
    fornax_source: str
    kind: Literal["argument", "output", "temporary", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment of a step at which the most memory is live."""

    bytes: int
    """All of it: arguments, outputs and temporaries."""
    temporaries: int
    """What is live at the peak besides arguments, and besides outputs that take their place."""
    instruction: str
    """Where: the instruction of the entry, then those inside loops, from outer to inner."""
    buffers: tuple[Buffer, ...]
    """The largest first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramFacts:
    """All that is read from one program, of one device."""

    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    schedule: tuple[Item, ...]
    flops: float
    """Of a step: operations times their counts."""
    vector_flops: float
    transcendentals: float
    bytes: float
    peak: Peak
    notes: tuple[str, ...]
    """What was not understood or only bounded: loops, custom calls, groups; each by name."""
