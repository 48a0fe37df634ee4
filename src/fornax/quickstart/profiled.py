"""The stage after pretraining: a few of its steps, from their capture, as a page and numbers."""

from typing import Any

from fornax import profile
from fornax.config.errors import ProfileError
from fornax.profile.page import write_page
from fornax.quickstart.job import Job
from fornax.train import RunDirectory

__all__ = ["make", "make_line"]

_MODULES = 6


def make(job: Job) -> dict[str, Any]:
    """Read what pretraining captured, and write `profile.html` beside the report."""
    try:
        found = profile.read(RunDirectory(job.run_dir).profile)
    except ProfileError as error:  # a machine whose profiler does not start trains all the same
        return {"missing": str(error)}
    if not found.step_times():
        return {"missing": "the capture holds no whole step"}
    page = write_page(found, job.run_dir / "profile.html")
    times = [causes for _, causes in found.step_times()]
    total = {cause: sum(each.seconds[cause] for each in times) for cause in times[0].seconds}
    return {
        "page": page.name,
        "steps": len(times),
        "seconds": {cause: seconds / len(times) for cause, seconds in total.items()},
        "modules": [[row.key, row.share] for row in found.ops("module").rows[:_MODULES]],
    }


def make_line(result: dict[str, Any]) -> str:
    """One line of it."""
    if "missing" in result:
        return f"not profiled: {result['missing']}"
    seconds = result["seconds"]
    whole = sum(seconds.values())
    name, share = result["modules"][0]
    return (
        f"{1e3 * whole:.0f} ms per step, {seconds['compute'] / whole:.0%} of it computing, most of "
        f"that in {name} ({share:.0%})"
    )
