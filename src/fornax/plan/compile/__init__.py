"""Compiling for hardware that is not here, in a child process, with a cache.

`compile_train` gives the training step and the evaluation of a config; `compile_programs` gives
whatever a builder makes. A program that does not fit raises `OutOfMemoryError` with figures.
"""

from fornax.plan.compile.arguments import array_facts
from fornax.plan.compile.cache import Kept, kept
from fornax.plan.compile.call import compile_program, compile_programs, compile_train
from fornax.plan.compile.errors import CompileError, MissingCompilerError, OutOfMemoryError
from fornax.plan.compile.request import Job, Lowering, Request

__all__ = [
    "CompileError",
    "Job",
    "Kept",
    "Lowering",
    "MissingCompilerError",
    "OutOfMemoryError",
    "Request",
    "array_facts",
    "compile_program",
    "compile_programs",
    "compile_train",
    "kept",
]
