"""Samples of a run by step, by prompt, searched and put in order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fornax.dashboard.folder import Folder
from fornax.dashboard.samples import SampleFiles

ASKED: dict[str, Any] = {
    "step": None, "prompt": None, "search": "", "order": "drawn", "offset": 0, "limit": 50,
}  # fmt: skip


def sample(step: int, number: int, **changes: Any) -> dict[str, Any]:
    found = {
        "step": step,
        "prompt": f"question {number % 3}",
        "completion": f"answer {step}-{number}",
        "reward": float(number),
        "advantage": -float(number),
        "tokens": 10 * number,
    }
    return {**found, **changes}


def test_samples_are_found(tmp_path: Path, write: Callable[..., None]) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, *(sample(step, number) for step in (1, 2, 4) for number in range(6)))
    files = SampleFiles(Folder(tmp_path))

    newest = files.find(path, **ASKED)
    assert (newest["steps"], newest["step"], newest["total"]) == ([1, 2, 4], 4, 6)
    assert [each["reward"] for each in newest["samples"]] == [0, 1, 2, 3, 4, 5]

    best = files.find(path, **{**ASKED, "step": 2, "order": "-reward", "limit": 2, "offset": 1})
    assert [each["reward"] for each in best["samples"]] == [4, 3]
    assert {each["step"] for each in best["samples"]} == {2}

    over_steps = files.find(path, **{**ASKED, "prompt": "question 1"})
    assert [(each["step"], each["reward"]) for each in over_steps["samples"]] == [
        (1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 4),
    ]  # fmt: skip
    assert files.find(path, **{**ASKED, "search": "ANSWER 4-3"})["total"] == 1
    assert files.find(path, **{**ASKED, "step": 3})["samples"] == []
    assert files.find(tmp_path / "none.jsonl", **ASKED)["samples"] == []

    write(path, sample(7, 1, completion="x" * 30_000, reward=None))
    (late,) = files.find(path, **{**ASKED, "order": "-reward"})["samples"]
    assert late["step"] == 7
    assert late["cut"] is True
    assert len(late["completion"]) == 20_000

    write(path, sample(1, 0), mode="w")  # as a run that was started again does
    assert files.find(path, **ASKED)["steps"] == [1]
