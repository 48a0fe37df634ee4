"""From the text of an optimized HLO module to facts: operations, collectives, buffers, lines."""

from fornax.plan.hlo.module import Computation, Frame, Instruction, Module
from fornax.plan.hlo.parser import HloParseError, parse
from fornax.plan.hlo.shapes import Shape, parse_shape

__all__ = [
    "Computation",
    "Frame",
    "HloParseError",
    "Instruction",
    "Module",
    "Shape",
    "parse",
    "parse_shape",
]
