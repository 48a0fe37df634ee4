"""What ran where, from the results files: writes docs/design/status.md, the table of the guide on
installing, and what `fornax doctor` says of a platform.

A file `results/<date>-<device>-<name>` is a measurement, or a run of the device tests, on that
device; `results/<date>-cpu-plan_published.md` is a table of programs that the TPU's own compiler
made. The sentence on devices in README.md is the one here, and a test says so.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "design" / "status.md"
INSTALL = ROOT / "docs" / "guides" / "install.md"
SHIPPED = ROOT / "src" / "fornax" / "cli" / "platforms.json"
"""The table's rows by jax's name of the platform, which `fornax doctor` reads."""
MARKS = ("<!-- status: python benchmarks/status.py -->", "<!-- end of status -->")
"""Between these the guide has the table."""
PLATFORMS = ("CPU", "GPU", "TPU")
COMPILED = {"plan_published": "TPU"}
"""Results that are programs compiled for a platform that was not there."""
_NAME = re.compile(r"(\d{4}-\d\d-\d\d)-([a-z0-9_.]+)-([A-Za-z0-9_.-]+)\.(md|json)")


@dataclass(frozen=True)
class Found:
    """One results file."""

    path: Path
    date: str
    device: str
    name: str

    @property
    def platform(self) -> str:
        """CPU, GPU or TPU."""
        if self.device == "cpu":
            return "CPU"
        return "TPU" if self.device.startswith(("tpu", "v5", "v6")) else "GPU"

    @property
    def failed(self) -> list[str]:
        """The device tests that did not pass."""
        if self.path.suffix != ".json":
            return []
        tests = json.loads(self.path.read_text())["tests"]
        return [name for name, outcome in tests.items() if outcome != "passed"]


def read(folder: Path) -> list[Found]:
    """All results of a folder, the newest last."""
    names = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [Found(path, *named.group(1, 2, 3)) for path, named in names if named]


def sentence(results: Iterable[Found]) -> str:
    """Where Fornax was measured, compiled for, and never run."""
    results = list(results)
    ran = [p for p in PLATFORMS if any(one.platform == p for one in results)]
    compiled = {COMPILED[one.name] for one in results if one.name in COMPILED}
    never = [p for p in PLATFORMS if p not in ran]
    parts = [f"measured on {' and '.join(ran)}"] if ran else []
    only = [p for p in never if p in compiled]
    parts += [f"programs compiled for {' and '.join(only)}"] if only else []
    parts += [f"not yet run on {' or '.join(never)}"] if never else []
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def rows(results: Iterable[Found]) -> dict[str, tuple[str, str]]:
    """For each platform what was tested there, and what was measured."""
    results = list(results)
    found = {}
    for platform in PLATFORMS:
        here = [one for one in results if one.platform == platform and one.name not in COMPILED]
        tests = [one for one in here if one.name == "device_test"]
        compiled = [one for one in results if COMPILED.get(one.name) == platform]
        if platform == "CPU":
            tested = "every test, in CI"
        elif tests:
            failed = len(tests[-1].failed)
            outcome = f"{failed} failed" if failed else "all passed"
            tested = f"device tests on {tests[-1].device}, {tests[-1].date}: {outcome}"
        elif compiled:
            tested = f"compiled by its own compiler, {compiled[-1].date}; never run"
        elif platform == "GPU":
            tested = "programs lowered for CUDA in CI, not compiled; never run"
        else:
            tested = "never run"
        measured = [one.date for one in here if one.name != "device_test"]
        found[platform] = (tested, f"yes, last {max(measured)}" if measured else "no")
    return found


def table(results: Iterable[Found]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| platform | tested | measured |", "|---|---|---|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows(results).items()]
    return "\n".join(lines)


def shipped(results: Iterable[Found]) -> str:
    """The rows as `fornax doctor` reads them."""
    told = {
        name.lower(): f"{tested}; measured: {measured}"
        for name, (tested, measured) in rows(results).items()
    }
    return json.dumps(told, indent=1) + "\n"


def with_table(text: str, results: Iterable[Found]) -> str:
    """A page with the table between its marks."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{after}"


def page(results: Iterable[Found]) -> str:
    """The page of status."""
    results = list(results)
    lines = ["# Status", "", sentence(results), "", table(results), ""]
    lines += ["Generated by `python benchmarks/status.py` from the files in `benchmarks/results/`."]
    for platform in PLATFORMS:
        lines += ["", f"## {platform}", ""]
        lines += _of_platform(platform, results)
    return "\n".join(lines) + "\n"


def _of_platform(platform: str, results: list[Found]) -> list[str]:
    here = [one for one in results if one.platform == platform and one.name not in COMPILED]
    lines = [_row(one) for one in here if one.device != "cpu"]
    if platform == "CPU" and here:
        lines.append("- tested by `make test` and CI; measured: `benchmarks/results/*-cpu-*`")
    compiled = [one for one in results if COMPILED.get(one.name) == platform]
    lines += [
        f"- compiled by the {platform}'s own compiler, not run: `{one.path.name}`, {one.date}"
        for one in compiled
    ]
    if platform == "GPU" and not here:
        lines.append(
            "- lowered for CUDA, neither compiled nor run: every kernel, a training step of three "
            "families and an engine's programs (`make device-test DEVICE=cpu`, in CI)"
        )
    if not here:
        lines.append("- never run")
    return lines


def _row(one: Found) -> str:
    if one.name != "device_test":
        return f"- measured: `{one.path.name}`, {one.date}"
    failed = one.failed
    said = f"failed: {', '.join(failed)}" if failed else "all passed"
    return f"- tested on {one.device}: `{one.path.name}`, {one.date}; {said}"


def main() -> int:
    """Write the pages and the file."""
    results = read(RESULTS)
    PAGE.write_text(page(results))
    INSTALL.write_text(with_table(INSTALL.read_text(), results))
    SHIPPED.write_text(shipped(results))
    print(sentence(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
