"""The files that a plan is written to: JSON, and back."""

import json
import os
from pathlib import Path
from typing import Any

from fornax.config import ConfigError, from_mapping, to_mapping
from fornax.plan.report.data import Plan

__all__ = ["make_folder", "read_json", "to_json", "write_json", "write_values"]

FORMAT = 1


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; `read_json` reads them back. `summary` is for programs that ask."""
    memory = plan.main.memory
    summary = {
        "fits": plan.fits,
        "total_bytes": memory.total,
        "usable_bytes": memory.usable,
        "step_seconds": plan.main.step_seconds,
        "bound": plan.main.bound,
        "mfu": plan.speed.mfu if plan.speed else None,
    }
    return {"format": FORMAT, "summary": summary, **to_mapping(plan)}


def write_json(plan: Plan, path: Path) -> Path:
    """Write the plan to `path` in one replacement.

    Raises:
      ConfigError: when the file cannot be written.
    """
    return write_values(to_json(plan), path)


def write_values(values: dict[str, Any], path: Path) -> Path:
    """Write plain values as JSON to `path` in one replacement.

    Raises:
      ConfigError: when the file cannot be written.
    """
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write the plan to {path}: {error.strerror or error}; name a file in a folder "
            "that can be written"
        ) from error
    return path


def make_folder(path: Path) -> None:
    """Make the folder that the file `path` goes into.

    Raises:
      ConfigError: when it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder of {path}: {error.strerror or error}; name another file"
        ) from error


def read_json(path: Path) -> Plan:
    """The plan that `write_json` wrote.

    Raises:
      ConfigError: when the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a file that --json wrote") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ConfigError(
            f"{path} is no plan of format {FORMAT}; name a file that --json wrote, or plan again"
        )
    found.pop("summary", None)
    return from_mapping(Plan, found, str(path))
