"""What a plan says, and how it is shown: a table, JSON, one self-contained page."""

from fornax.plan.report.data import Advice, Hardware, Money, Option, Plan, Run, Speed, Table
from fornax.plan.report.file import read_json, to_json, write_json
from fornax.plan.report.page import write_page
from fornax.plan.report.program import (
    Buffer,
    ClassOfWork,
    Collective,
    Compilation,
    Finding,
    Memory,
    MemoryPart,
    ProgramReport,
)
from fornax.plan.report.terminal import print_plan, render_table

__all__ = [
    "Advice",
    "Buffer",
    "ClassOfWork",
    "Collective",
    "Compilation",
    "Finding",
    "Hardware",
    "Memory",
    "MemoryPart",
    "Money",
    "Option",
    "Plan",
    "ProgramReport",
    "Run",
    "Speed",
    "Table",
    "print_plan",
    "read_json",
    "render_table",
    "to_json",
    "write_json",
    "write_page",
]
