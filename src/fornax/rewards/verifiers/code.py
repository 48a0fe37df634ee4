"""Does a program pass its tests? In the sandbox, on limited time, memory, files and no network."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fornax.config.errors import ConfigError
from fornax.rewards.sandbox import REQUIRED, Limits, run_program
from fornax.rewards.verifiers.python_source import signature, source

__all__ = ["TABLE", "CodeOptions"]


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """How the verifier `code` runs programs."""

    column: str = "tests"
    """The column with the tests: Python source, a list of such, or a list of {"input", "output"}:
    what the program reads and must print."""
    partial: bool = False
    """Whether the score is the share of tests passed, instead of 1 for all of them and 0 else."""
    packages: bool = False
    """Whether programs may import the packages of this environment."""
    unheld: Literal["refuse", "allow"] = "refuse"
    """What to do where the kernel does not hold all that is promised."""
    limits: Limits = field(default_factory=Limits)
    """What each run may use."""


def _code(options: CodeOptions) -> tuple[Callable[..., float], tuple[str, ...]]:
    required = REQUIRED if options.unheld == "refuse" else frozenset()
    run_program("", limits=options.limits, required=required)  # does this machine hold it?

    def verify(prompt: Any, completion: str, **record: Any) -> float:
        tests = read_tests(record[options.column])
        head = prompt if isinstance(prompt, str) and signature(prompt) else ""
        program = source(head, completion)
        if program is None:
            return 0.0
        given = {"limits": options.limits, "packages": options.packages, "required": required}
        if isinstance(tests[0], str):
            found = run_program(program, tests=[str(test) for test in tests], **given)
            passed = sum(found.passed)
        else:
            passed = 0
            for case in tests:
                found = run_program(program, stdin=str(case["input"]), **given)
                right = _lines(found.output) == _lines(str(case["output"]))
                passed += found.code == 0 and right
                if not (right or options.partial):
                    break
        return passed / len(tests) if options.partial else float(passed == len(tests))

    return verify, (options.column,)


def read_tests(value: Any) -> Sequence[str] | Sequence[Mapping[str, Any]]:
    """The tests of a line of data: sources, or cases of input and output.

    Raises:
      ConfigError: anything else.
    """
    if isinstance(value, str):
        try:
            found = json.loads(value)  # tables often keep lists as text
        except ValueError:
            found = [value]
        value = found if isinstance(found, list) else [value]
    sources = isinstance(value, list) and all(isinstance(test, str) for test in value)
    cases = isinstance(value, list) and all(
        isinstance(test, Mapping) and "input" in test and "output" in test for test in value
    )
    if not value or not (sources or cases):
        raise ConfigError(
            "tests must be Python source, a list of it, or a list of objects with input and output"
        )
    return value


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, nor empty ones at the text's."""
    return [line.rstrip() for line in text.strip().splitlines()]


TABLE = {"code": (CodeOptions, _code)}
