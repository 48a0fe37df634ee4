"""Does a program pass its tests? In the sandbox, on limited time, memory, files and no network."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fornax.config.errors import ConfigError
from fornax.rewards.sandbox import REQUIRED, Limits, run_program, run_tests
from fornax.rewards.spec import Verdict
from fornax.rewards.verifiers.python_source import before_last, signature, source

__all__ = ["TABLE", "CodeOptions"]


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """How the verifier `code` runs programs."""

    column: str = "tests"
    """The column with the tests: Python source, a list of such, or a list of {"input", "output"}:
    what the program reads and must print."""
    entry: str = "entry_point"
    """The column with the name of the function that was asked for, where a line has it; elsewhere
    it is the last one that the prompt begins. Tests may call it `candidate`."""
    partial: bool = False
    """Whether the score is the share of tests passed, instead of 1 for all of them and 0 else."""
    packages: bool = False
    """Whether programs may import the packages of this environment."""
    unheld: Literal["refuse", "allow"] = "refuse"
    """What to do where the kernel does not hold all that is promised."""
    limits: Limits = field(default_factory=Limits)
    """What each run may use."""


def _code(options: CodeOptions) -> tuple[Callable[..., Verdict], tuple[str, ...]]:
    required = REQUIRED if options.unheld == "refuse" else frozenset()
    given = {"limits": options.limits, "packages": options.packages, "required": required}
    run_program("", **given)  # does this machine hold it?

    def verify(prompt: Any, completion: str, **record: Any) -> Verdict:
        tests = read_tests(record[options.column])
        asked = signature(prompt) if isinstance(prompt, str) else None
        head = prompt if asked else ""
        program = source(head, completion)
        if program is None:
            return _verdict(0, len(tests), options.partial)
        sources = [test for test in tests if isinstance(test, str)]
        if not sources:
            return _verdict(_right(program, tests, options, given), len(tests), options.partial)
        entry = str(record.get(options.entry) or (asked.name if asked else ""))
        setup = before_last(head) if head else ""
        found = run_tests(program, sources, setup=setup, entry=entry, **given).verdicts
        counted = [verdict for verdict in found if verdict != "setup"]
        weak = counted.count("weak") if counted else len(tests)  # tests that test nothing
        return _verdict(counted.count("passed"), len(counted), options.partial, weak)

    return verify, (options.column,)


def _verdict(passed: int, count: int, partial: bool, weak: int = 0) -> Verdict:
    share = passed / count if count else 0.0
    return Verdict(share if partial else float(share == 1.0), {"weak_tests": float(weak)})


def _right(
    program: str, cases: Sequence[Any], options: CodeOptions, given: Mapping[str, Any]
) -> int:
    """How many cases of input and output a program meets; all or nothing stops at the first."""
    passed = 0
    for case in cases:
        found = run_program(program, stdin=str(case["input"]), **given)
        right = found.code == 0 and _lines(found.output) == _lines(str(case["output"]))
        passed += right
        if not (right or options.partial):
            break
    return passed


def read_tests(value: object) -> Sequence[str] | Sequence[Mapping[str, object]]:
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
