"""Compiling for hardware that is not here, in a child process, with a cache.

`compile_train` gives the training step and the evaluation of a config; `compile_programs` gives
whatever a builder makes. A program that does not fit raises `OutOfMemoryError` with figures.
"""

from fornax.plan.compile.errors import CompileError, MissingCompilerError, OutOfMemoryError
from fornax.plan.compile.parent import compile_programs, traced_calls
from fornax.plan.compile.request import Job, Lowering, Request, array_facts
from fornax.plan.compile.train import compile_train, train_request

__all__ = [
    "CompileError",
    "Job",
    "Lowering",
    "MissingCompilerError",
    "OutOfMemoryError",
    "Request",
    "array_facts",
    "compile_programs",
    "compile_train",
    "traced_calls",
    "train_request",
]
