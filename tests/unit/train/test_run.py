"""`train` with a task of one's own: lines, evaluations, checkpoints, stops and resumes."""

import dataclasses
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.checkpoint import Checkpointer
from fornax.config import ConfigError, DataError, FornaxError
from fornax.config.price import PriceTable
from fornax.config.progress import Quiet
from fornax.mesh import MeshConfig
from fornax.optim import SGD, OptimConfig
from fornax.train import (
    EvalConfig,
    Hosts,
    LogConfig,
    Loss,
    ProfileConfig,
    SkipConfig,
    Task,
    TrainerConfig,
    read_metrics,
    summarise,
    train,
)
from fornax.train.config import PrometheusConfig

ROWS = 16


class Slope(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.slope = nnx.Param(jnp.zeros(()), axes=())
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def line(model: Any, batch: Any, key: jax.Array) -> Loss:
    error = (model.slope[...] * batch["x"] - batch["y"]) ** 2
    kept = model.dropout(jnp.ones(()))
    weight = jnp.float32(batch["x"].shape[0])
    return Loss(total=jnp.sum(error), weight=weight, metrics={"kept": (kept * weight, weight)})


class Points(Iterator):
    """Rows of y = 3x; the position is a number of batches."""

    def __init__(self, limit: int | None = None):
        self.limit, self.read, self.closed = limit, 0, False

    def __next__(self) -> dict[str, np.ndarray]:
        if self.read == self.limit:
            raise StopIteration
        self.read += 1
        x = np.random.default_rng(self.read).normal(size=ROWS).astype(np.float32)
        return {"x": x, "y": 3 * x}

    def state(self) -> dict[int, dict]:
        return {0: {"read": self.read}}

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        self.read = state[0]["read"]

    def close(self) -> None:
        self.closed = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlopeConfig(TrainerConfig):
    """A config of the task's own: one key more than the trainer's."""

    note: str = "plain"
    """Nothing reads it but the tests."""


CONFIG = SlopeConfig(
    steps=10,
    batch_size=ROWS,
    save_every=4,
    mesh=MeshConfig(data=-1, fsdp=1),
    optim=OptimConfig(optimizer=SGD(momentum=None), learning_rate=0.3, clip=()),
    eval=EvalConfig(every=4, batches=2),
    log=LogConfig(every=3),
)


def task(limit: int | None = None) -> Task:
    return Task(
        build=Slope,
        loss=line,
        batches=lambda split, hosts: Points(3 if split == "eval" else limit),
        summarise=lambda means: {**means, "root": means["loss"] ** 0.5},
        unit="points",
    )


def steps(run_dir: Path) -> list[int]:
    return [r["step"] for r in read_metrics(run_dir / "metrics.jsonl")]


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing of the report out: it takes longer than these runs."""
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    config = dataclasses.replace(
        CONFIG, log=LogConfig(every=1, peak_tflops=1.0), profile=ProfileConfig(steps="5..6")
    )
    priced = dataclasses.replace(task(), flops_per_unit=1e6)
    result = train(config, run_dir, task=priced, progress="none")
    assert (result.reason, result.step, result.exit_code) == ("finished", 10, 0)
    return run_dir


def test_a_run_leaves_what_its_directory_promises(whole: Path):
    names = {p.name for p in whole.iterdir()}
    assert names >= {
        "config.yaml", "metrics.jsonl", "goodput.jsonl", "checkpoints", "tensorboard", "profile",
        "report.html",
    }  # fmt: skip
    assert list((whole / "profile").rglob("*.xplane.pb"))
    assert Checkpointer(whole / "checkpoints").all_steps() == [4, 8, 10]
    records = read_metrics(whole / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 11))
    assert records[-1]["points"] == 160
    assert records[-1]["loss"] < 0.2 * records[0]["loss"]
    assert all(r["points_per_second"] > 0 and 0 < r["mfu"] < 1 for r in records)
    evaluated = {r["step"]: r for r in records if "eval/loss" in r}
    assert sorted(evaluated) == [4, 8, 10]
    assert evaluated[8]["eval/weight"] == 32
    assert evaluated[8]["eval/root"] == pytest.approx(evaluated[8]["eval/loss"] ** 0.5)
    assert evaluated[8]["eval/kept"] == 1.0  # dropout is off
    assert {r["kept"] for r in records} == {0.0, 2.0}  # and on, with a new key each step


@pytest.mark.usefixtures("no_report")
def test_the_ledger_sums_to_the_time_it_took(tmp_path: Path):
    """All but the start of the interpreter and the drawing of the report, switched off here."""
    for number in range(4):  # once more where the machine stood still outside of the ledger
        began = time.perf_counter()
        result = train(CONFIG, tmp_path / str(number), task=task(), progress="none")
        wall = time.perf_counter() - began
        assert result.goodput is not None
        seconds = result.goodput.seconds
        assert sum(seconds.values()) == pytest.approx(result.goodput.wall_seconds)
        assert result.goodput.wall_seconds <= wall
        if result.goodput.wall_seconds > 0.8 * wall:
            break
    assert result.goodput.wall_seconds > 0.8 * wall
    assert min(seconds[c] for c in ("initialise", "compile", "step", "evaluate", "checkpoint")) > 0


@pytest.mark.usefixtures("no_report")
def test_lines_come_as_often_as_asked_and_at_every_evaluation(tmp_path: Path):
    train(CONFIG, tmp_path, task=task(), progress="none")
    assert steps(tmp_path) == [3, 4, 6, 8, 9, 10]


@pytest.mark.usefixtures("no_report")
def test_a_run_is_watched_and_paid_for(tmp_path: Path):
    """The page for Prometheus, read in the run's own step, is there until the run ends, and not
    after; the price is that of every device."""
    said: list[str] = []
    pages: list[str] = []

    class Told(Quiet):
        def log(self, line: str) -> None:
            said.append(line)

        def update(self, record: Any, left: float | None) -> None:
            with urllib.request.urlopen(said[0].rpartition(" ")[2], timeout=120) as answer:
                pages.append(answer.read().decode())

    log = LogConfig(tensorboard=False, prometheus=PrometheusConfig(port=0))
    config = dataclasses.replace(CONFIG, steps=2, save_every=None, eval=EvalConfig(), log=log)
    result = train(
        *(config, tmp_path / "mine"),
        task=task(),
        progress=Told(),
        prices=PriceTable(currency="EUR", chips={"cpu": 3.6}),
    )
    assert said[0].startswith("metrics for Prometheus: http://127.0.0.1:")
    assert len(pages) == 2
    for number, page in enumerate(pages, 1):
        assert f'fornax_train_step{{run="mine"}} {number}.0' in page
        assert 'fornax_train_loss{run="mine"}' in page
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(said[0].rpartition(" ")[2], timeout=120)
    found = result.goodput
    assert found is not None
    assert found.cost == pytest.approx(found.wall_seconds * jax.device_count() * 0.001)


def test_a_chip_without_a_price_is_said_before_training(tmp_path: Path):
    prices = PriceTable(chips={"v5p": 1.0})
    with pytest.raises(ConfigError, match="the price table has no price for cpu, it has v5p"):
        train(CONFIG, tmp_path / "run", task=task(), prices=prices)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_report")
def test_a_run_in_pieces_equals_the_whole(whole: Path, tmp_path: Path):
    """Stopped by a request after the data ended early, then continued."""
    config = dataclasses.replace(CONFIG, log=LogConfig(every=1))
    first = train(config, tmp_path, task=task(limit=6), progress="none")
    assert (first.reason, first.step, first.exit_code) == ("data", 6, 0)
    second = train(config, tmp_path, task=task(), progress="none")
    assert second.step == 10
    exact = ("step", "loss", "grad_norm", "kept", "points", "learning_rate", "eval/loss")
    one, other = (
        [[r.get(name) for name in exact] for r in read_metrics(path / "metrics.jsonl")]
        for path in (whole, tmp_path)
    )
    assert one == other
    assert summarise(tmp_path / "goodput.jsonl").attempts == 2


def test_a_finished_run_is_not_run_again(whole: Path):
    before = (whole / "metrics.jsonl").read_bytes()
    config = dataclasses.replace(CONFIG, log=LogConfig(every=1))
    result = train(config, whole, task=task(), progress="none")
    assert (result.reason, result.step, result.metrics) == ("finished", 10, None)
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_key_of_the_tasks_own_config_is_compared_too(whole: Path):
    config = dataclasses.replace(CONFIG, note="another")
    with pytest.raises(ConfigError, match=r"another config: note: plain -> another"):
        train(config, whole, task=task(), progress="none")


class Interrupting(Quiet):
    """Sends a signal to this process at the third step."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def update(self, record: Any, seconds_left: float) -> None:
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    def log(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.usefixtures("no_report")
def test_a_signal_stops_with_a_checkpoint_and_handlers_are_put_back(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    shown = Interrupting()
    result = train(
        dataclasses.replace(CONFIG, steps=100_000), tmp_path, task=task(), progress=shown
    )
    assert (result.reason, result.exit_code) == ("signal", 143)
    assert 3 <= result.step < 1000
    assert Checkpointer(tmp_path / "checkpoints").latest_step() == result.step
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "SIGTERM: finishing this step and saving a checkpoint" in shown.said


@pytest.mark.usefixtures("no_report")
def test_a_run_in_a_thread_needs_no_handlers(tmp_path: Path):
    found: list[Any] = []
    worker = threading.Thread(
        target=lambda: found.append(train(CONFIG, tmp_path, task=task(), progress="none"))
    )
    worker.start()
    worker.join()
    assert found[0].reason == "finished"


def test_a_run_that_only_skips_stops_with_the_reason(tmp_path: Path):
    def broken(model: Any, batch: Any, key: jax.Array) -> Loss:
        loss = line(model, batch, key)
        return dataclasses.replace(loss, total=loss.total * jnp.nan)

    config = dataclasses.replace(CONFIG, skip=SkipConfig(max_consecutive=3), eval=EvalConfig())
    with pytest.raises(FornaxError, match=r"step 3: 3 updates in a row were skipped .*Lower"):
        train(config, tmp_path, task=dataclasses.replace(task(), loss=broken), progress="none")
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(r["loss"] is None and r["skipped"] for r in records)


def test_an_empty_evaluation_split_is_refused(tmp_path: Path):
    empty = dataclasses.replace(
        task(), batches=lambda split, hosts: Points(0 if split == "eval" else None)
    )
    with pytest.raises(DataError, match=r"evaluation split has no batch .*eval.every: null"):
        train(CONFIG, tmp_path, task=empty, progress="none")


def test_batches_are_closed_whatever_happens(tmp_path: Path):
    opened: list[Points] = []

    def open_points(split: str, hosts: Hosts) -> Points:
        opened.append(Points(0 if split == "eval" else None))
        return opened[-1]

    watched = dataclasses.replace(task(), batches=open_points)
    with pytest.raises(DataError):
        train(CONFIG, tmp_path, task=watched, progress="none")
    assert any(points.read for points in opened)
    assert all(points.closed for points in opened)
