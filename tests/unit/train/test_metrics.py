"""Sinks: each step once, resumed or not; the optional ones get the same numbers."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]

from fornax.config.errors import ConfigError
from fornax.train.config import WandbConfig
from fornax.train.metrics import MetricsFile, Wandb, read_metrics
from fornax.train.tensorboard import TensorBoard


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "skipped": False, "time": 1000.0 + step, **more}


def test_a_resumed_file_holds_each_step_once_in_order(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in range(1, 8):
        first.write(record(step, attempt=1))
    second = MetricsFile(path, 4)  # killed after step 7, checkpoint at 4; nothing was closed
    for step in range(5, 10):
        second.write(record(step, attempt=2))
    second.close()
    first.close()
    found = read_metrics(path)
    assert [r["step"] for r in found] == list(range(1, 10))
    assert [r["attempt"] for r in found] == [1] * 4 + [2] * 5


def scalars(directory: Path) -> list[tuple[int, str, float]]:
    found = []
    for file in sorted(directory.iterdir()):
        data, place = file.read_bytes(), 0
        while place < len(data):
            length = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += 16 + length
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


def test_tensorboard_gets_every_number_but_the_clock(tmp_path: Path):
    board = TensorBoard(tmp_path / "tb", 0)
    board.write(record(1, note="text is left out"))
    board.write(record(2))
    board.close()
    assert scalars(tmp_path / "tb") == [
        (1, "loss", 1.0),
        (1, "skipped", 0.0),
        (2, "loss", 0.5),
        (2, "skipped", 0.0),
    ]


class FakeWandb:
    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict]] = []
        self.finished = False

    def init(self, **arguments: Any) -> Any:
        self.started = arguments
        return SimpleNamespace(
            log=lambda numbers, step: self.logged.append((step, numbers)), finish=self.finish
        )

    def finish(self) -> None:
        self.finished = True


def test_wandb_run_is_named_so_that_a_resume_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = Wandb(WandbConfig(project="p", mode="offline"), tmp_path / "my-run", {"steps": 3})
    sink.write(record(3))
    sink.close()
    assert fake.started["id"] == "my-run"
    assert fake.started["resume"] == "allow"
    assert fake.started["config"] == {"steps": 3}
    assert fake.logged == [(3, {"loss": pytest.approx(1 / 3), "skipped": 0.0})]
    assert fake.finished


def test_wandb_without_the_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"install `fornax-ai\[wandb\]`, or remove log.wandb"):
        Wandb(WandbConfig(), tmp_path, {})
