"""Which directories are runs, of which kind, and how they fare."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fornax.config import dump_yaml, to_mapping
from fornax.dashboard.configs import difference, flat_config
from fornax.dashboard.folder import Folder
from fornax.dashboard.runs import Locks, Summary, discover, summarise
from fornax.dashboard.store import RunStore
from fornax.train import RunDirectory
from fornax.tune.methods import METHODS

Write = Callable[..., None]


def names(folder: Path) -> list[str]:
    return [run.id for run in discover(Folder(folder))[0]]


def summary(folder: Path, name: str) -> Summary:
    runs = {run.id: run for run in discover(Folder(folder))[0]}
    return summarise(Folder(folder), runs[name], Locks())


def test_runs_are_found_below_folders_and_runs(tmp_path: Path, write: Write) -> None:
    for name in ("a", "group/b", "group/b/sft", "deep/er/and/deep/er/c"):
        write(tmp_path / name / "metrics.jsonl", {"step": 1})
    write(tmp_path / "a" / "checkpoints" / "metrics.jsonl", {"step": 1})
    write(tmp_path / ".hidden" / "metrics.jsonl", {"step": 1})
    write(tmp_path / "1/2/3/4/5/6/7/too-deep" / "metrics.jsonl", {"step": 1})
    assert names(tmp_path) == ["a", "deep/er/and/deep/er/c", "group/b", "group/b/sft"]
    assert names(tmp_path / "group" / "b") == ["b", "b/sft"]


def test_links_neither_lead_out_nor_in_a_circle(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "outside" / "metrics.jsonl", {"step": 1})
    runs = tmp_path / "runs"
    write(runs / "a" / "metrics.jsonl", {"step": 1})
    (runs / "out").symlink_to(tmp_path / "outside")
    (runs / "a" / "loop").symlink_to(runs)
    (runs / "dangling").symlink_to(runs / "nothing")
    assert names(runs) == ["a"]
    (runs / "b").mkdir()
    (runs / "b" / "metrics.jsonl").symlink_to(tmp_path / "outside" / "metrics.jsonl")
    assert names(runs) == ["a"]


def test_names_that_are_no_text_are_left_out(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "run <b>&\u00fc\u4e2d" / "metrics.jsonl", {"step": 1})
    bad = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(bad)
    Path(os.fsdecode(bad), "metrics.jsonl").write_text('{"step": 1}\n')
    assert names(tmp_path) == ["run <b>&\u00fc\u4e2d"]


def test_a_real_run(trained: Path) -> None:
    found = summary(trained.parent, "tiny")
    assert (found.kind, found.method, found.status) == ("train", "pretrain", "finished")
    assert (found.step, found.steps) == (12, 12)
    assert found.config["optim.learning_rate"] == pytest.approx(3e-4, rel=10)
    assert found.metrics["loss"] is not None
    assert found.started is not None
    assert found.started <= time.time()
    assert list(found.alerts) == []


def test_flat_configs_are_those_of_the_text(trained: Path) -> None:
    text = (trained / "config.yaml").read_text()
    config = flat_config(text)
    assert config["model.hidden_size"] == 32
    assert config["data.source.type"] == "dataset"
    assert config["optim.optimizer.eps"] == 1e-8  # PyYAML by itself reads text
    assert config["spikes"] is None
    assert flat_config("a: [1\nb: 2") == {}
    assert flat_config("a: &x 1\nb: *x") == {}
    assert flat_config("") == {}


def test_the_difference_of_configs() -> None:
    rows = difference([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}])
    assert [(row["key"], row["same"]) for row in rows] == [("b", False), ("c", False), ("a", True)]
    assert rows[0]["values"] == [2, 3]


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_tuning_are_told_by_their_configs(
    tmp_path: Path, write: Write, name: str
) -> None:
    required: dict[str, Any] = {"model": "m", "data": "d"}
    required |= {"teacher": "t"} if name == "distill" else {}
    required |= {"reward": ("r.py:f",)} if name in ("grpo", "ppo") else {}
    config = METHODS[name].config_class()(**required)
    assert to_mapping(config)["model"] == "m"
    write(tmp_path / "run" / "metrics.jsonl", {"step": 1, "loss": 1.0})
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(config))
    found = summary(tmp_path, "run")
    assert found.kind == "tune"
    assert found.method == {"reward": None}.get(name, name)


def old(path: Path) -> None:
    """As if nothing had been written for an hour."""
    for file in path.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)


def test_a_lock_says_that_a_run_runs(tmp_path: Path, write: Write) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    write(run.metrics, {"step": 3, "loss": 1.0, "time": time.time()})
    (run.path / "config.yaml").write_text("steps: 10\n")
    old(run.path)
    with run:
        assert summary(tmp_path, "run").status == "running"
        run.unlock()
        assert summary(tmp_path, "run").status == "stopped"
        run.lock()
        store = RunStore(Folder(tmp_path))
        assert store.runs()["run"]["status"] == "running"  # and did not take the lock itself
        run.unlock()
        run.lock()


@pytest.mark.parametrize(
    ("events", "steps", "status"),
    [
        ([{"state": "ended", "code": 0}], 5, "finished"),
        ([{"state": "ended", "code": 0}], 10, "stopped"),
        ([{"state": "ended", "code": 1, "why": "no hosts"}], 10, "failed"),
        ([{"state": "ended", "code": 143}], 10, "stopped"),
        ([], None, "stopped"),
    ],
)
def test_how_a_run_ended(
    tmp_path: Path, write: Write, events: list[dict], steps: int | None, status: str
) -> None:
    run = tmp_path / "run"
    write(run / "metrics.jsonl", {"step": 5, "loss": 1.0})
    write(run / "events.jsonl", *({"time": 1.0, "epoch": 1, "why": "", **e} for e in events))
    (run / "config.yaml").write_text(f"steps: {steps}\n" if steps else "seed: 1\n")
    old(run)
    found = summary(tmp_path, "run")
    assert found.status == status
    assert any(alert.kind == "fault" for alert in found.alerts) == (status == "failed")


def test_a_traceback_says_that_it_failed(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "run" / "metrics.jsonl", {"step": 5, "loss": 1.0})
    old(tmp_path / "run")
    (tmp_path / "run" / "traceback-x.txt").write_text("...")
    assert summary(tmp_path, "run").status == "failed"


def test_other_kinds(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "s" / "server.jsonl", {"kind": "serve", "model": "m", "time": 1.0})
    write(tmp_path / "h" / "server.jsonl", {"kind": "host", "time": 1.0, "stopped": True})
    write(tmp_path / "c" / "events.jsonl", {"time": 1.0, "epoch": 1, "state": "forming"})
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "quantization_report.json").write_text("{}")
    found = {name: summary(tmp_path, name) for name in names(tmp_path)}
    kinds = {name: each.kind for name, each in found.items()}
    assert kinds == {"s": "serve", "h": "host", "c": "cluster", "q": "quantize"}
    assert found["h"].status == "stopped"


def test_a_folder_that_goes_has_no_runs(tmp_path: Path, write: Write) -> None:
    folder = tmp_path / "runs"
    write(folder / "a" / "metrics.jsonl", {"step": 1})
    store = RunStore(Folder(folder))
    assert list(store.runs()) == ["a"]
    (folder / "a" / "metrics.jsonl").unlink()
    (folder / "a").rmdir()
    folder.rmdir()
    time.sleep(0.6)
    assert store.runs() == {}
