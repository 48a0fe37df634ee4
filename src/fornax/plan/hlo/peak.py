"""The peak of memory, told in a user's terms: where, and which buffers, by name and source line."""

from collections.abc import Mapping
from typing import Literal

from fornax.plan.hlo.contents import holder_of
from fornax.plan.hlo.facts import Buffer, Peak
from fornax.plan.hlo.liveness import Liveness, size_of
from fornax.plan.hlo.module import Computation, Module
from fornax.plan.hlo.shapes import HBM, leaves
from fornax.plan.hlo.sources import sources
from fornax.plan.hlo.values import Piece


def find_peak(module: Module, most: int = 40) -> Peak:
    """Return the peak of HBM and the `most` largest buffers that are live there."""
    live, values = Liveness(module).entry()
    arguments = [
        Piece(parameter, number, leaf, 0, 0)
        for parameter in module.entry.parameters.values()
        for number, leaf in enumerate(leaves(parameter.shape))
        if leaf.space == HBM
    ]
    outputs = {id(piece.find()) for piece in values.of[module.entry.root.name]}
    homes = {
        instruction.name: computation
        for computation in module.computations.values()
        for instruction in computation.instructions
    }
    used = sum(map(size_of, arguments))
    found = [_buffer(module, homes, piece, "argument") for piece in arguments]
    for piece in sorted(live.pieces, key=size_of, reverse=True)[:most]:
        kind = "output" if id(piece.find()) in outputs else "temporary"
        found.append(_buffer(module, homes, piece, kind))
    found.sort(key=lambda buffer: buffer.bytes, reverse=True)
    where = live.path[-1] if live.path else module.entry.root
    return Peak(
        bytes=used + live.bytes,
        temporaries=live.bytes,
        instruction=" > ".join(step.name for step in live.path),
        source=sources(module, where)[0],
        buffers=tuple(found[:most]),
    )


def _buffer(
    module: Module,
    homes: Mapping[str, Computation],
    piece: Piece,
    kind: Literal["argument", "output", "temporary"],
) -> Buffer:
    holder = piece.maker
    if kind != "argument":
        holder = holder_of(module, homes[piece.maker.name], piece.maker, piece.leaf)
    own, ours = sources(module, holder)
    parts = len(leaves(piece.maker.shape)) > 1
    return Buffer(
        name=piece.maker.name + (f"{{{piece.leaf}}}" if parts else ""),
        bytes=size_of(piece),
        unpadded_bytes=piece.shape.unpadded_bytes,
        shape=str(piece.shape),
        op_name=holder.op_name,
        source=own,
        fornax_source=ours,
        kind=kind,
    )
