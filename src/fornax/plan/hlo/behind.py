"""Which argument of the program lies behind a value that is only moved: sliced, cast, copied."""

from fornax.plan.hlo.module import Computation, Instruction, Module

_MOVING_NAMES = (
    "bitcast convert copy reshape transpose copy-done copy-start slice dynamic-slice slice-start "
    "slice-done dynamic-slice-start dynamic-slice-done opt-barrier collective-permute-start "
    "collective-permute-done collective-permute all-gather all-gather-start all-gather-done "
    "reduce-precision"
)
_MOVING = frozenset(_MOVING_NAMES.split())
_STEPS = 64


class Callers:
    """Follows values from where they are used back to the arguments of the entry."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._callers: dict[str, tuple[Computation, Instruction]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode in ("while", "fusion", "call", "async-start"):
                    for name in instruction.called():
                        self._callers.setdefault(name, (computation, instruction))

    def argument(self, computation: Computation, instruction: Instruction) -> str:
        """Return the name of the argument that an instruction moves, empty for anything else."""
        if not instruction.operands:
            return ""
        instruction, leaf = computation.operands(instruction)[0], 0
        for _ in range(_STEPS):
            if instruction.opcode == "parameter":
                if computation is self.module.entry:
                    return instruction.op_name
                caller = self._callers.get(computation.name)
                if caller is None:
                    return ""
                computation, user = caller
                number = instruction.parameter_number
                if number >= len(user.operands):
                    return ""
                instruction = computation.operands(user)[number]
            elif instruction.opcode == "get-tuple-element":
                leaf = int(instruction.attributes["index"])
                instruction = computation.operands(instruction)[0]
            elif instruction.opcode == "tuple":
                instruction, leaf = computation.operands(instruction)[leaf], 0
            elif instruction.opcode == "while":
                instruction = computation.operands(instruction)[0]
            elif instruction.opcode == "fusion":
                computation = self.module.computations[instruction.attributes["calls"].lstrip("%")]
                instruction = computation.root
            elif instruction.opcode in _MOVING or instruction.target == "ConcatBitcast":
                instruction = computation.operands(instruction)[0]
            else:
                return ""
        return ""
