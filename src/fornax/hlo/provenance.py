"""Where a value comes from: its source line, the argument behind it, what computed its contents.

Compilers allocate a stack of saved activations before the loop that fills it, and copy arrays
between layouts: neither says what is in them. So from an allocation we continue to the loop that
updates it, and from there, as from a copy, back to what was computed.
"""

import re

from fornax.hlo.module import Computation, Frame, Instruction
from fornax.hlo.shapes import leaves
from fornax.hlo.traffic import updated_operands

_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "<string>")
_PACKAGE = re.compile(r"/(?:src|site-packages|dist-packages)/(fornax/.*\.py)$")
_SHARED_FILES = ("fornax/kernels/", "fornax/models/scope.py")
_SHARED_FUNCTIONS = frozenset(["Projection", "project"])
"""What every layer calls: its line says less than the caller's."""

_COPYING_NAMES = (
    "bitcast convert copy reshape transpose copy-done copy-start broadcast reduce-precision pad "
    "slice-done slice-start dynamic-slice-done opt-barrier concatenate"
)
_COPYING = frozenset(_COPYING_NAMES.split())
_MOVING_NAMES = (
    "bitcast convert copy reshape transpose copy-done copy-start slice dynamic-slice slice-start "
    "slice-done dynamic-slice-start dynamic-slice-done opt-barrier collective-permute-start "
    "collective-permute-done collective-permute all-gather all-gather-start all-gather-done "
    "reduce-precision"
)
_MOVING = frozenset(_MOVING_NAMES.split())
_HOLDING = frozenset(["fusion", "fusion-start", "async-start", "call-start"])
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')
_STEPS = 24
_ARGUMENT_STEPS = 64
_READERS = 5
_TURNS = 3
"""How often a value is followed from one turn of a loop into the turn before."""


def source_lines(instruction: Instruction) -> tuple[str, str]:
    """Return the line that asked for an instruction, and the innermost line in fornax.

    The first is the innermost outside of installed libraries and of what serves all layers
    (kernels, projections), so that it tells an attention's product from an MLP's. Fornax counts as
    outside of libraries wherever it is installed; its paths begin at the package. Empty where
    there is none.
    """
    number, known = instruction.frame, instruction.module.lines
    if number and number in known:
        return known[number]
    frames = [frame for frame in instruction.stack() if _ours(frame) or not _installed(frame)]
    asking = next((frame for frame in frames if not _shared(frame)), None)
    inner = next((frame for frame in frames if _ours(frame)), None)
    found = _text(asking or (frames[0] if frames else None)), _text(inner)
    if number:
        known[number] = found
    return found


def _ours(frame: Frame) -> bool:
    return _PACKAGE.search(frame.file) is not None


def _installed(frame: Frame) -> bool:
    return not frame.file or any(part in frame.file for part in _LIBRARIES)


def _shared(frame: Frame) -> bool:
    package = _PACKAGE.search(frame.file)
    if package is None:
        return False
    owner = frame.function.partition(".")[0]
    return package.group(1).startswith(_SHARED_FILES) or owner in _SHARED_FUNCTIONS


def _text(frame: Frame | None) -> str:
    if frame is None:
        return ""
    package = _PACKAGE.search(frame.file)
    file = package.group(1) if package else frame.file
    function = frame.function.rpartition("<locals>.")[2] or frame.function
    return f"{file}:{frame.line}" + (f" ({function})" if function else "")


def argument_behind(instruction: Instruction) -> str:
    """Return the name of the program's argument that an instruction moves.

    Between the two the value is only sliced, cast and copied; empty for anything else.
    """
    if not instruction.operands:
        return ""
    instruction, leaf = instruction.operands[0], 0
    for _ in range(_ARGUMENT_STEPS):
        if instruction.opcode == "parameter":
            caller = instruction.computation.caller
            if instruction.computation is instruction.module.entry:
                return instruction.op_name
            if caller is None or instruction.parameter_number >= len(caller.operands):
                return ""
            instruction = caller.operands[instruction.parameter_number]
        elif instruction.opcode == "get-tuple-element":
            leaf = instruction.tuple_index
            instruction = instruction.operands[0]
        elif instruction.opcode == "tuple":
            instruction, leaf = instruction.operands[leaf], 0
        elif instruction.opcode == "fusion":
            instruction = instruction.callee().root
        elif (
            instruction.opcode in _MOVING
            or instruction.opcode == "while"
            or instruction.target == "ConcatBitcast"
        ):
            instruction = instruction.operands[0]
        else:
            return ""
    return ""


def contents_of(maker: Instruction, leaf: int) -> Instruction:
    """Return the instruction that best says what the `leaf`-th array made by `maker` is."""
    found = maker
    if maker.target == "AllocateBuffer" or maker.opcode in ("broadcast", "constant"):
        found = _filler(maker, leaf, _STEPS) or maker
    found = _origin(found, leaf)
    return found if found.op_name or found.frame else maker


def named_source(instruction: Instruction) -> Instruction:
    """Return an instruction, or where it has no name in the source what it works on."""
    if instruction.op_name or not instruction.operands:
        return instruction
    if instruction.opcode == "fusion":
        found = _origin(instruction, 0)
    else:
        written = 1 if instruction.opcode.startswith("dynamic-update-slice") else 0
        found = _origin(instruction.operands[written], 0)
    if found.frame:
        return found
    # An argument has a name and no line: the line is that of who reads it.
    return _reader(instruction) or (found if found.op_name else instruction)


def _reader(instruction: Instruction) -> Instruction | None:
    """Return the nearest instruction with a name that reads what one makes.

    What is sent comes back by the receive of the same name: a collective across slices.
    """
    while (holder := _holder(instruction.computation)) is not None:
        instruction = holder
    rendezvous = _RENDEZVOUS.search(instruction.rest)
    front = [instruction]
    if rendezvous:
        front = [e for e in instruction.computation.instructions if rendezvous.group() in e.rest]
    for _ in range(_READERS):
        front = [user for each in front for user in each.users]
        found = next((user for user in front if user.op_name), None)
        if found is not None:
            return found
    return None


def _holder(computation: Computation) -> Instruction | None:
    """Return the fusion or start that a computation is the inside of."""
    caller = computation.caller
    return caller if caller is not None and caller.opcode in _HOLDING else None


def _filler(room: Instruction, leaf: int, steps: int) -> Instruction | None:
    """Return what is first written into an array, by following it to an update in place."""
    if steps == 0:
        return None
    for user in room.users:
        positions = [n for n, operand in enumerate(user.operands) if operand is room]
        for leaf_out, operand in updated_operands(user):
            if operand in positions:
                return _written(user, leaf_out)
        found = None
        if user.opcode == "while":
            found = _inside_loop(user, leaf, steps)
        elif user.opcode == "tuple":
            offset = sum(len(leaves(each.shape)) for each in user.operands[: positions[0]])
            found = _filler(user, offset + leaf, steps - 1)
        elif user.opcode in ("bitcast", "copy", "copy-start", "copy-done"):
            found = _filler(user, 0, steps - 1)
        if found is not None:
            return found
    return None


def _inside_loop(loop: Instruction, leaf: int, steps: int) -> Instruction | None:
    state = loop.callee("body").parameters[0]
    for part in state.users:
        if part.opcode == "get-tuple-element":
            elements = state.shape.elements or ()
            before = sum(len(leaves(element)) for element in elements[: part.tuple_index])
            if before <= leaf < before + len(leaves(elements[part.tuple_index])):
                return _filler(part, leaf - before, steps - 1) or _next_state(part)
    return None


def _next_state(part: Instruction) -> Instruction | None:
    """Return what a loop's body makes of an element of its state."""
    body = part.computation
    state = body.parameters[0]
    if body.root.opcode != "tuple" or part.operands[0] is not state:
        return None
    if str(body.root.shape) != str(state.shape):  # A branch, not a loop's body.
        return None
    following = body.root.operands[part.tuple_index]
    return None if following is part else following


def _written(update: Instruction, leaf: int) -> Instruction:
    """Return the value that an update in place, or a fusion that ends in one, writes."""
    if update.opcode == "fusion":
        update = _result(update, leaf)
        while update.opcode in ("bitcast", "reshape"):
            update = update.operands[0]
    if update.opcode in ("dynamic-update-slice", "scatter"):
        return update.operands[1 if update.opcode == "dynamic-update-slice" else -1]
    return update


def _origin(instruction: Instruction, leaf: int) -> Instruction:
    """Go back through copies and conversions to what was computed."""
    turns = 0
    for _ in range(_STEPS):
        if instruction.opcode == "fusion":
            inner = _result(instruction, leaf)
            if inner.opcode not in _COPYING and inner.opcode != "parameter" and inner.op_name:
                return inner
            instruction, leaf = inner, 0
        elif instruction.opcode == "parameter" and (holder := _holder(instruction.computation)):
            instruction = holder.operands[instruction.parameter_number]
        elif instruction.opcode == "get-tuple-element":
            source = instruction.operands[0]
            if source.opcode == "parameter" and turns < _TURNS:
                following = _next_state(instruction)
                if following is not None:
                    instruction, turns = following, turns + 1
                    continue
            if source.opcode not in ("fusion", "custom-call"):
                return instruction
            leaf = instruction.tuple_index
            instruction = source
        elif instruction.operands and (
            instruction.opcode in _COPYING or not (instruction.op_name or instruction.frame)
        ):
            instruction = instruction.operands[0]
        else:
            return instruction
    return instruction


def _result(fusion: Instruction, leaf: int) -> Instruction:
    """Return the result inside a fusion that is its `leaf`-th."""
    results = fusion.callee().results
    return results[min(leaf, len(results) - 1)]
