"""From the text of an optimized HLO module to facts: operations, collectives, buffers, lines."""

from fornax.plan.hlo.analysis import analyse
from fornax.plan.hlo.facts import (
    Buffer,
    Collective,
    Done,
    Item,
    Loop,
    Operation,
    Peak,
    ProgramFacts,
    Run,
    Start,
)
from fornax.plan.hlo.module import Computation, Frame, Instruction, Module
from fornax.plan.hlo.parser import HloParseError, parse
from fornax.plan.hlo.shapes import Shape, parse_shape

__all__ = [
    "Buffer",
    "Collective",
    "Computation",
    "Done",
    "Frame",
    "HloParseError",
    "Instruction",
    "Item",
    "Loop",
    "Module",
    "Operation",
    "Peak",
    "ProgramFacts",
    "Run",
    "Shape",
    "Start",
    "analyse",
    "parse",
    "parse_shape",
]
