"""The process that a preflight runs in: a request on standard input, an event a line on output."""

import dataclasses
import json
import sys
from typing import Any

from fornax.config import FornaxError, from_yaml
from fornax.plan.preflight.result import Check

__all__ = ["main"]


def main() -> int:
    """Read a request; say each answer as it comes, then the report, or the error."""
    events = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no event
    request = json.loads(sys.stdin.read())

    def say(event: str, content: Any) -> None:
        events.write(json.dumps({"event": event, "content": content}) + "\n")
        events.flush()

    def progress(check: Check) -> None:
        say("check", dataclasses.asdict(check))

    from fornax.mesh import initialize
    from fornax.plan.preflight.run import check
    from fornax.train import TrainConfig, with_model

    try:
        config = from_yaml(TrainConfig, request["config"], source="the config")
        initialize()
        report = check(
            with_model(config, None),
            quick=request["quick"],
            only=request["only"],
            progress=progress,
        )
    except FornaxError as error:
        say("error", {"type": type(error).__name__, "message": str(error)})
        return 0
    say("report", dataclasses.asdict(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
