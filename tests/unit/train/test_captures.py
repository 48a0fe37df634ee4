"""Captures of a run: by its config, on request, every N steps; what the run does by itself."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from tests.unit.train.test_run import CONFIG, Points, steps, task

from fornax import profile
from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError
from fornax.config.goodput import summarise
from fornax.config.run_requests import answer_of, ask, pending
from fornax.train import EvalConfig, LogConfig, ProfileConfig, TrainResult, train
from fornax.train.task import Task

QUIET = dataclasses.replace(
    CONFIG, eval=EvalConfig(), save_every=None, log=LogConfig(tensorboard=False)
)


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing of the report out: it takes longer than these runs."""
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)


def run(run_dir: Path, task: Task | None = None, **changes: Any) -> TrainResult:
    config = dataclasses.replace(QUIET, **changes)
    return train(config, run_dir, task=task or slope(), progress="none")


class Paced(Points):
    """Calls `before` with the number of each batch."""

    def __init__(self, before: Callable[[int], None]):
        super().__init__(None)
        self.before = before

    def __next__(self) -> Any:
        self.before(self.read + 1)
        return super().__next__()


def slope(before: Callable[[int], None] = lambda step: None) -> Task:
    return dataclasses.replace(task(), batches=lambda split, hosts: Paced(before))


def captured(folder: Path) -> list[list[int]]:
    """The numbers of the steps of each capture, the oldest first."""
    found = sorted((folder / "plugins" / "profile").iterdir())
    return [[step.number for step in profile.read(each).steps] for each in found]


def test_a_window_of_steps_is_captured_with_what_the_host_does(tmp_path: Path) -> None:
    run(
        tmp_path,
        profile=ProfileConfig(steps="4..6"),
        save_every=5,
        eval=EvalConfig(every=5, batches=1),
    )
    found = profile.read(tmp_path / "profile")
    assert [(step.name, step.number) for step in found.steps] == [
        ("train", 4), ("train", 5), ("train", 6)
    ]  # fmt: skip
    names = set(found.names)
    assert {"input/wait", "checkpoint", "evaluate"} <= names
    assert steps(tmp_path)[-1] == 10
    account = summarise(tmp_path / "goodput.jsonl")
    assert 0 < account.seconds["profile"] < account.wall_seconds


def test_a_run_for_its_profile_alone_ends_with_it_and_saves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "prof"
    only = ProfileConfig(steps="3..4", out=str(out), only=True)
    result = run(tmp_path / "run", profile=only, steps=1000, save_every=2)
    assert (result.step, result.reason, result.exit_code) == (4, "finished", 0)
    assert captured(out) == [[3, 4]]
    assert Checkpointer(tmp_path / "run" / "checkpoints").all_steps() == []


def test_one_step_in_so_many_is_kept_small(tmp_path: Path) -> None:
    jax.clear_caches()  # a capture holds every program of its process, those of other tests too
    run(tmp_path, steps=14, profile=ProfileConfig(every=2, keep=3, steps="5..6"))
    # Step 6 lies in the window, which goes first.
    assert [step.number for step in profile.read(tmp_path / "profile").steps] == [5, 6]
    assert captured(tmp_path / "profile" / "continuous") == [[10], [12], [14]]
    size = sum(f.stat().st_size for f in (tmp_path / "profile").rglob("*.pb"))
    assert size < 20 << 20


def test_a_size_bounds_what_is_kept_whatever_the_number(tmp_path: Path) -> None:
    continuous = tmp_path / "profile" / "continuous" / "plugins" / "profile"
    old = continuous / "2020_01_01_00_00_00_step_1"
    old.mkdir(parents=True)
    (old / "vm.xplane.pb").write_bytes(bytes(2 << 20))
    run(tmp_path, steps=3, profile=ProfileConfig(every=2, keep=3, keep_mib=1))
    assert [path.name.rpartition("_step_")[2] for path in continuous.iterdir()] == ["00000002"]


def test_a_run_honours_what_it_is_asked_while_it_goes(tmp_path: Path) -> None:
    asked: dict[str, Path] = {}

    def before(step: int) -> None:
        if step == 3:
            asked["profile"] = ask(tmp_path, "profile", steps=2)
            asked["checkpoint"] = ask(tmp_path, "checkpoint")
            time.sleep(1.1)
        if step == 8:
            asked["stop"] = ask(tmp_path, "stop")
            time.sleep(1.1)

    result = run(tmp_path, slope(before), steps=500)
    assert (result.step, result.reason, result.exit_code) == (8, "signal", 130)
    answers = {kind: answer_of(path) for kind, path in asked.items()}
    assert answers["checkpoint"]["result"] == {"step": 4}
    assert answers["stop"]["result"] == {"step": 8}
    assert Checkpointer(tmp_path / "checkpoints").all_steps() == [4, 8]
    told = answers["profile"]["result"]
    assert told["steps"] == [4, 5]
    assert [step.number for step in profile.read(Path(told["directory"])).steps] == [4, 5]
    assert pending(tmp_path) == []


def test_a_request_from_before_the_run_and_one_at_its_end_are_refused(tmp_path: Path) -> None:
    early = ask(tmp_path, "stop")
    late: list[Path] = []

    def before(step: int) -> None:
        if step == 10:
            late.extend([ask(tmp_path, "profile", steps=4), ask(tmp_path, "profile")])

    result = run(tmp_path, slope(before))
    assert result.reason == "finished"
    assert "did not run when this was asked" in answer_of(early)["error"]
    # Nobody looked after the last step: who starts the run again is warned.
    run(tmp_path, steps=10)
    assert "did not run when this was asked" in answer_of(late[0])["error"]


def test_a_capture_that_cannot_begin_costs_no_run(tmp_path: Path) -> None:
    asked: list[Path] = []

    def before(step: int) -> None:
        if step == 2:
            asked.append(ask(tmp_path, "profile"))
            time.sleep(1.1)

    with profile.capture(tmp_path / "mine"):
        result = run(tmp_path, slope(before), profile=ProfileConfig(steps="2..3"))
    assert result.step == 10
    assert "a capture runs already" in answer_of(asked[0])["error"]
    assert not (tmp_path / "profile" / "plugins").exists()


def test_an_exception_in_a_captured_step_ends_the_capture(tmp_path: Path) -> None:
    def before(step: int) -> None:
        if step == 5:
            raise ArithmeticError("the data is at fault")

    with pytest.raises(ArithmeticError):
        run(tmp_path, slope(before), profile=ProfileConfig(steps="4..9"))
    assert captured(tmp_path / "profile")[0][0] == 4
    with profile.capture(tmp_path / "next"):
        pass


def test_a_folder_that_cannot_be_read_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requests").write_text("a file in its place")
    said: list[str] = []
    from fornax.train.captures import Inbox

    inbox = Inbox(directory=tmp_path, log=said.append)
    monkeypatch.setattr("fornax.train.captures._LOOK_SECONDS", 0.0)
    assert [inbox.take(turn) for turn in range(3)] == [[], [], []]
    assert len(said) == 1
    assert "nothing can be asked of it by files" in said[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": "5..3"}, "steps=5..3 must be the first and the last step"),
        ({"steps": "0..3"}, "counted from 1"),
        ({"steps": "3...5"}, "such as 20..25"),
        ({"steps": "three"}, "such as 20..25"),
        ({"steps": "1..500"}, "500 steps, and a capture holds 200 at most"),
        ({"every": 0}, "every=0 must be 1 or more, or null"),
        ({"keep": 0}, "keep=0 must be 1 or more"),
        ({"only": True}, "only is set and steps is null"),
    ],
)
def test_what_cannot_be_captured_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        ProfileConfig(**given)


def test_a_window_beyond_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"profile\.steps=9\.\.11 reaches beyond steps=10"):
        dataclasses.replace(QUIET, profile=ProfileConfig(steps="9..11"))
    assert ProfileConfig(steps=7).window == (7, 7)
