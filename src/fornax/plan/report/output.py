"""Plans shown and written: on a terminal, as a page, as JSON and back."""

import dataclasses
import json
from pathlib import Path

from fornax.config import ConfigError, from_mapping, to_mapping
from fornax.plan.facts import Plan
from fornax.plan.measured import Beside
from fornax.plan.report import serving, training
from fornax.plan.report.document import Document, write_figures
from fornax.plan.report.measured import beside_section
from fornax.plan.report.page import write_document
from fornax.plan.report.terminal import WIDTH, print_document, render_document
from fornax.plan.serving_facts import ServePlan

FORMAT = 1


def print_plan(plan: Plan | ServePlan, measured: Beside | None = None) -> None:
    """Print the plan: as wide as the terminal up to a hundred columns, as plain text elsewhere.

    `measured` is a capture of what was planned, shown beside it.
    """
    print_document(_document(plan, measured))


def render_table(plan: Plan | ServePlan, width: int = WIDTH, measured: Beside | None = None) -> str:
    """The plan as plain text, `width` columns wide, a hundred at most; `measured` as in
    `print_plan`."""
    return render_document(_document(plan, measured), width)


def write_page(plan: Plan | ServePlan, path: Path, measured: Beside | None = None) -> Path:
    """Write the plan as a page that fetches nothing; `measured` as in `print_plan`.

    Raises:
      ConfigError: when the file cannot be written.
    """
    return write_document(_document(plan, measured), path)


def too_large(plan: Plan | ServePlan) -> str | None:
    """By how much a plan does not fit and what would fix it, in a paragraph; None if it fits."""
    return training.too_large(plan) if isinstance(plan, Plan) else serving.too_large(plan)


def _document(plan: Plan | ServePlan, measured: Beside | None = None) -> Document:
    if isinstance(plan, ServePlan):
        return serving.serving_document(plan)
    document = training.training_document(plan)
    if measured is None:
        return document
    return dataclasses.replace(document, sections=(*document.sections, beside_section(measured)))


def write_json(plan: Plan | ServePlan, path: Path, measured: Beside | None = None) -> Path:
    """Write every figure to `path` in one replacement; `summary` is for programs that ask, and
    `measured` as in `print_plan`.

    Raises:
      ConfigError: when the file cannot be written.
    """
    figures = {"format": FORMAT, **_summary(plan), **to_mapping(plan)}
    if measured is not None:
        figures["measured"] = to_mapping(measured)
    return write_figures(figures, path)


def _summary(plan: Plan | ServePlan) -> dict[str, object]:
    if isinstance(plan, ServePlan):
        return {}
    main = plan.main
    return {
        "summary": {
            "fits": plan.fits,
            "total_bytes": main.memory.total,
            "usable_bytes": main.memory.usable,
            "step_seconds": main.step_seconds,
            "bound": main.bound,
            "mfu": plan.speed.mfu if plan.speed else None,
        }
    }


def read_json(path: Path) -> Plan:
    """The training plan that `write_json` wrote.

    Raises:
      ConfigError: when the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a file that --json wrote") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ConfigError(
            f"{path} is not a plan of format {FORMAT}; name a file that --json wrote, or plan again"
        )
    found.pop("summary", None)
    found.pop("measured", None)
    return from_mapping(Plan, found, str(path))
