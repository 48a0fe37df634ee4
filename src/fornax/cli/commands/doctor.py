"""`fornax doctor`: what this machine offers, what is off, and how to mend it."""

import dataclasses

from fornax.cli import machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say what Fornax finds here: versions, devices, compiler, cores, memory, disk, extras.

    What is off stands at the end, each with its fix. The exit code is 2 when something keeps
    Fornax from working, else 0.

    example:
      fornax doctor
    """


def run(arguments: Arguments) -> int:
    """Print the findings."""
    findings = machine.examine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")  # noqa: T201
    off = [finding for finding in findings if finding.fix]
    print()  # noqa: T201
    if not off:
        print("Nothing is off.")  # noqa: T201
    for finding in off:
        level = "error" if finding.fatal else "note"
        print(f"{level}: {finding.name}: {finding.problem}; {finding.fix}")  # noqa: T201
    return 2 if any(finding.fatal for finding in off) else 0
