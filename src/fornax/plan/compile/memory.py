"""Whose the memory of a compiled program is: its arguments' owners, and what its buffers are for.

The compiler does not distinguish gradients and activations. A buffer made by the forward pass and
alive at the peak is an activation that was kept; one that the backward pass makes with as many
elements as a chip holds of a parameter is a gradient; the rest are temporaries, the gaps of the
arena included.
"""

import math
import re
from collections.abc import Iterable

from fornax.hlo import Buffer as LiveBuffer
from fornax.hlo import Peak, parse_shape
from fornax.plan.artifact import ArrayFact, Artifact
from fornax.plan.facts import Buffer, MemoryPart
from fornax.plan.format import argument_path, short_operation

_OWNED = ("parameters", "optimizer", "cache", "batch", "other")
_MADE = ("gradients", "activations", "temporaries")
_ARGUMENTS = (
    ("optimizer", re.compile(r"\b(optimizer|opt_state|mu|nu)\b")),
    ("parameters", re.compile(r"\bparams\b")),
    ("batch", re.compile(r"^batch\b")),
    ("cache", re.compile(r"\bcache\b")),
)
_LOSS = re.compile(r"cross_entropy|next_token_loss")
"""The loss turns its logits into gradients at once: they are not kept."""
_LARGEST = 12


def memory_parts(artifact: Artifact, peak: Peak, devices: int) -> tuple[MemoryPart, ...]:
    """A chip's memory by owner; the sum is what the compiler says the program needs.

    Args:
      artifact: the program.
      peak: its buffers where most memory is alive.
      devices: JAX devices of a chip.
    """
    memory, owned = artifact.memory, artifact.owned()
    sizes = {owner: owned.get(owner, 0) for owner in _OWNED}
    sizes["other"] += max(0, memory.arguments - sum(owned.values()))  # what layouts pad
    sizes["other"] += memory.code + max(0, memory.outputs - memory.aliased)
    made = _made(artifact.arguments, artifact, peak)
    room = memory.temporaries
    for owner in ("gradients", "activations"):
        sizes[owner] = min(made.get(owner, 0), room)
        room -= sizes[owner]
    sizes["temporaries"] = room
    order = ("parameters", "optimizer", *_MADE, "cache", "batch", "other")
    return tuple(MemoryPart(owner=owner, bytes=sizes[owner] * devices) for owner in order)


def largest_buffers(artifact: Artifact, peak: Peak) -> tuple[Buffer, ...]:
    """The largest buffers alive at the peak, of one device."""
    counts = _parameter_sizes(artifact.arguments, artifact)
    return tuple(
        Buffer(
            name=_name(buffer),
            owner=_owner(buffer, counts),
            shape=buffer.shape,
            bytes=buffer.bytes,
            unpadded_bytes=buffer.unpadded_bytes,
            source=buffer.source or buffer.fornax_source,
        )
        for buffer in sorted(peak.buffers, key=lambda buffer: -buffer.bytes)[:_LARGEST]
    )


def _name(buffer: LiveBuffer) -> str:
    if buffer.kind == "argument":
        return argument_path(buffer.op_name) or buffer.name
    return short_operation(buffer.op_name) or buffer.name


def _made(arguments: Iterable[ArrayFact], artifact: Artifact, peak: Peak) -> dict[str, int]:
    counts = _parameter_sizes(arguments, artifact)
    sizes: dict[str, int] = {}
    for buffer in peak.buffers:
        if buffer.kind == "temporary":
            owner = _owner(buffer, counts)
            sizes[owner] = sizes.get(owner, 0) + buffer.bytes
    return sizes


def _parameter_sizes(arguments: Iterable[ArrayFact], artifact: Artifact) -> frozenset[int]:
    """Elements that one device holds of each parameter."""
    found = set()
    for array in arguments:
        if array.owner == "parameters":
            parts = math.prod(artifact.mesh[axis] for entry in array.axes for axis in entry)
            found.add(math.prod(array.shape) // parts)
    return frozenset(found)


def _owner(buffer: LiveBuffer, parameters: frozenset[int]) -> str:
    if buffer.kind == "argument":
        return next((o for o, pattern in _ARGUMENTS if pattern.search(buffer.op_name)), "other")
    if buffer.kind != "temporary":
        return "other"
    backward = "transpose(" in buffer.op_name
    if backward and _elements(buffer.shape) in parameters:
        return "gradients"
    loss = _LOSS.search(f"{buffer.op_name} {buffer.source} {buffer.fornax_source}")
    if "jvp(" in buffer.op_name and not backward and not loss:
        return "activations"
    return "temporaries"


def _elements(shape: str) -> int:
    try:
        return parse_shape(shape).size
    except ValueError:
        return -1
