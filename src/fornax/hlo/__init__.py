"""Compiled programs, read from optimized HLO: work, exchanges, buffers; and roofline times."""

from fornax.hlo.analysis import analyse
from fornax.hlo.facts import (
    Buffer,
    Category,
    Collective,
    CollectiveKind,
    Done,
    Item,
    Loop,
    Operation,
    Peak,
    ProgramFacts,
    Run,
    Start,
)
from fornax.hlo.module import Computation, Frame, Instruction, Module
from fornax.hlo.parser import HloParseError, parse
from fornax.hlo.provenance import contents_of, source_lines
from fornax.hlo.roofline import (
    CALIBRATIONS,
    Calibration,
    Rates,
    Timed,
    calibration_of,
    operation_seconds,
)
from fornax.hlo.shapes import Shape, parse_shape

__all__ = [
    "CALIBRATIONS",
    "Buffer",
    "Calibration",
    "Category",
    "Collective",
    "CollectiveKind",
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
    "Rates",
    "Run",
    "Shape",
    "Start",
    "Timed",
    "analyse",
    "calibration_of",
    "contents_of",
    "operation_seconds",
    "parse",
    "parse_shape",
    "source_lines",
]
