"""`fornax doctor`: what Fornax finds on this machine, the problems, and how to fix them."""

import dataclasses
import json
from typing import Annotated

from fornax.cli import machine
from fornax.cli.arguments import NO_DEFAULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show what Fornax finds on this machine: versions, devices, compiler, cores, memory, disk,
    extras.

    "platform" says what was tested and measured on this machine's kind of device.

    Problems follow at the end, each with its fix. The exit code is 2 when something keeps
    Fornax from working, else 0.

    examples:
      fornax doctor
      fornax doctor --json
    """

    json: Annotated[bool, NO_DEFAULT] = False
    """Print a list of findings: name, value, problem, fix, and whether it is fatal."""


def run(arguments: Arguments) -> int:
    """Print the findings."""
    findings = machine.examine()
    off = [finding for finding in findings if finding.fix]
    code = 2 if any(finding.fatal for finding in off) else 0
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))  # noqa: T201
        return code
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")  # noqa: T201
    print()  # noqa: T201
    if not off:
        print("No problems found.")  # noqa: T201
    for finding in off:
        level = "error" if finding.fatal else "note"
        print(f"{level}: {finding.name}: {finding.problem}; {finding.fix}")  # noqa: T201
    return code
