"""A run that goes back from loss spikes, beside one whose data never had those batches."""

import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.cases import one_in

from fornax.checkpoint import Checkpointer
from fornax.config import ConfigError, FornaxError
from fornax.config.progress import Quiet
from fornax.mesh import MeshConfig
from fornax.optim import SGD, Adafactor, AdamW, Muon, OptimConfig
from fornax.train import (
    EvalConfig,
    Hosts,
    LogConfig,
    Loss,
    PostTraining,
    SpikeConfig,
    SpikeLimit,
    Task,
    TrainerConfig,
    read_metrics,
    summarise,
    train,
)

ROWS, WIDTH = 8, 4
TRUTH = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / 8
EXACT = ("step", "loss", "grad_norm", "learning_rate", "rows", "noise", "skipped", "eval/loss")
HUGE, NAN = 1e3, math.nan


class Linear(nnx.Module):
    """A matrix, and dropout, so that a step's random key counts."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.zeros((WIDTH, WIDTH)), axes=("embed", "mlp"))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)


def loss(model: Any, batch: Any, key: jax.Array) -> Loss:
    error = (model.dropout(batch["x"]) @ model.kernel[...] - batch["y"]) ** 2
    weight = jnp.float32(batch["x"].shape[0])
    metrics = {"noise": (jax.random.uniform(key) * weight, weight)}
    return Loss(total=error.mean(1).sum(), weight=weight, metrics=metrics)


class Points(Iterator):
    """Rows of y = x TRUTH; `bad` batches have another y, those of `without` are not there. When the
    batch `stop` is read a SIGTERM comes, and reading is slow from then on: a thread passes it on.
    """

    def __init__(
        self,
        bad: Mapping[int, float],
        without: tuple[int, ...],
        limit: int,
        stop: int | None = None,
    ):
        self.numbers = [n for n in range(limit) if n not in without]
        self.bad, self.stop, self.read, self.pause = bad, stop, 0, 0.0

    def __next__(self) -> dict[str, np.ndarray]:
        if self.read == len(self.numbers):
            raise StopIteration
        number = self.numbers[self.read]
        self.read += 1
        if number == self.stop:
            self.stop, self.pause = None, 0.3
            signal.raise_signal(signal.SIGTERM)
        time.sleep(self.pause)
        x = np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)
        return {"x": x, "y": x @ TRUTH + np.float32(self.bad.get(number, 0.0))}

    def state(self) -> dict[int, dict]:
        return {0: {"read": self.read}}

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        self.read = state[0]["read"]

    def close(self) -> None:
        pass


def task(
    bad: Mapping[int, float] = {},
    without: tuple[int, ...] = (),
    limit: int = 200,
    stop: int | None = None,
) -> Task:
    def batches(split: str, hosts: Hosts) -> Points:
        return Points({}, (), 2) if split == "eval" else Points(bad, without, limit, stop)

    return Task(build=Linear, loss=loss, batches=batches, unit="rows")


SPIKES = SpikeConfig(
    loss=SpikeLimit(deviations=10.0, rise=3.0),
    grad_norm=SpikeLimit(deviations=10.0, rise=6.0),
    window=12,
    warmup=3,
    snapshot_every=5,
)
CONFIG = TrainerConfig(
    steps=30,
    batch_size=ROWS,
    save_every=None,
    mesh=MeshConfig(data=-1, fsdp=1),
    optim=OptimConfig(optimizer=SGD(), learning_rate=0.02),
    eval=EvalConfig(every=7, batches=2),
    log=LogConfig(tensorboard=False),
    spikes=SPIKES,
)


def changed(spikes: dict[str, Any] | None = None, **changes: Any) -> TrainerConfig:
    return dataclasses.replace(
        CONFIG, spikes=dataclasses.replace(SPIKES, **(spikes or {})), **changes
    )


def exact(run_dir: Path) -> list[tuple]:
    return [tuple(r.get(k) for k in EXACT) for r in read_metrics(run_dir / "metrics.jsonl")]


def rewinds(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "spikes.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def parameters(run_dir: Path) -> bytes:
    """All arrays of the last checkpoint but the paths' own names."""
    checkpointer = Checkpointer(run_dir / "checkpoints")
    step = checkpointer.latest_step()
    assert step is not None
    record = json.loads((run_dir / "checkpoints" / str(step) / "fornax.0.json").read_text())
    kernel = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    assert "kernel" in record["body"]
    state = checkpointer.restore({"params": {"kernel": kernel}}, step, partial=True).state
    return np.asarray(state["params"]["kernel"]).tobytes()


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "report" not in request.node.name:
        monkeypatch.setattr("fornax.train.report.write", lambda path: path)


@pytest.fixture(scope="module")
def never_had(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a guard over data without the batches 12 and 22."""
    run_dir = tmp_path_factory.mktemp("never_had")
    clean = dataclasses.replace(CONFIG, spikes=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fornax.train.report.write", lambda path: path)
        train(clean, run_dir, task=task(without=(12, 22)), progress="none")
    return run_dir


@pytest.mark.parametrize(
    "changes",
    one_in(
        2,
        [
            {},
            {"spikes": {"snapshot_every": None}},
            {"spikes": {"snapshot_every": None}, "save_every": 4},
            {"spikes": {"snapshots": 1}, "save_every": 5},
            {"log": LogConfig(every=4, tensorboard=True)},
        ],
    ),
    ids=["memory", "start", "checkpoint", "both", "sparse-log"],
)
def test_the_rest_of_the_run_is_that_of_data_that_never_had_the_batches(
    changes: dict[str, Any], never_had: Path, tmp_path: Path
):
    config = changed(**changes)
    result = train(config, tmp_path, task=task({12: NAN, 22: HUGE}), progress="none")
    assert (result.step, result.reason) == (30, "finished")
    wanted = exact(never_had)
    every = config.log.every
    assert exact(tmp_path) == [r for r in wanted if r[0] % every == 0 or r[-1] or r[0] == 30]
    assert parameters(tmp_path) == parameters(never_had)
    found = rewinds(tmp_path)
    assert [(r["step"], r["batch"], r["skipped"]) for r in found] == [
        (13, 12, [12]),
        (22, 22, [22]),
    ]
    metadata = Checkpointer(tmp_path / "checkpoints").read_metadata(30)
    assert (metadata["batches"], metadata["skipped_batches"]) == (32, [12, 22])
    memory = config.spikes is not None and config.spikes.snapshot_every
    wanted_source = "memory" if memory else "checkpoint" if config.save_every else "start"
    assert {r["source"] for r in found} == {wanted_source}
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (last["batch"], last["rewinds"]) == (31, 2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [AdamW(), Muon(), Adafactor()], ids=["adamw", "muon", "ada"])
def test_every_optimizer_and_accumulation_go_back_whole(optimizer: Any, tmp_path: Path):
    changes = {
        "optim": OptimConfig(optimizer=optimizer, learning_rate=0.01),
        "accumulate": 2,
        "mesh": MeshConfig(data=2, fsdp=2, tensor=2),
        "steps": 20,
    }
    train(changed(**changes), tmp_path / "a", task=task({11: NAN, 16: HUGE}), progress="none")
    clean = dataclasses.replace(CONFIG, spikes=None, **changes)
    train(clean, tmp_path / "b", task=task(without=(11, 16)), progress="none")
    assert [r["skipped"] for r in rewinds(tmp_path / "a")] == [[11], [16]]
    assert exact(tmp_path / "a") == exact(tmp_path / "b")
    assert parameters(tmp_path / "a") == parameters(tmp_path / "b")


def test_a_guard_that_finds_nothing_changes_nothing(tmp_path: Path):
    train(changed(steps=12), tmp_path / "a", task=task(), progress="none")
    clean = dataclasses.replace(CONFIG, spikes=None, steps=12)
    train(clean, tmp_path / "b", task=task(), progress="none")
    assert exact(tmp_path / "a") == exact(tmp_path / "b")
    assert not (tmp_path / "a" / "spikes.jsonl").exists()


@pytest.mark.slow
def test_batches_around_the_spike_are_left_out_and_later_checkpoints_with_them(tmp_path: Path):
    config = changed({"skip_before": 2, "skip_after": 1}, save_every=2)
    train(config, tmp_path / "a", task=task({13: HUGE}), progress="none")
    (rewind,) = rewinds(tmp_path / "a")
    assert rewind["skipped"] == [11, 12, 13, 14]
    assert (rewind["step"], rewind["back_to"], rewind["source"]) == (14, 10, "memory")
    clean = dataclasses.replace(CONFIG, spikes=None)
    train(clean, tmp_path / "b", task=task(without=(11, 12, 13, 14)), progress="none")
    assert exact(tmp_path / "a") == exact(tmp_path / "b")
    for step in (26, 28, 30):
        metadata = Checkpointer(tmp_path / "a" / "checkpoints").read_metadata(step)
        assert metadata["skipped_batches"] == [11, 12, 13, 14]


@pytest.mark.slow
def test_a_spike_in_the_last_step_and_one_before_the_data_end(tmp_path: Path):
    bad, without = {14: HUGE, 18: NAN}, (14, 18)
    result = train(changed(), tmp_path / "a", task=task(bad, limit=19), progress="none")
    assert (result.reason, result.step) == ("data", 17)
    clean = dataclasses.replace(CONFIG, spikes=None)
    train(clean, tmp_path / "b", task=task(without=without, limit=19), progress="none")
    assert exact(tmp_path / "a") == exact(tmp_path / "b")
    result = train(changed(steps=15), tmp_path / "c", task=task(bad), progress="none")
    assert (result.reason, result.step) == ("finished", 15)
    clean = dataclasses.replace(clean, steps=15)
    train(clean, tmp_path / "d", task=task(without=without), progress="none")
    assert exact(tmp_path / "c") == exact(tmp_path / "d")


@pytest.mark.parametrize("stop", one_in(2, [9, 12, 13, 20]))
def test_a_stop_changes_nothing(stop: int, never_had: Path, tmp_path: Path):
    """The window, the list and the position come from the checkpoint."""
    bad = {12: NAN, 22: HUGE}
    result = train(changed(), tmp_path, task=task(bad, stop=stop), progress="none")
    assert (result.reason, result.exit_code) == ("signal", 143)
    train(changed(), tmp_path, task=task(bad), progress="none")
    assert exact(tmp_path) == exact(never_had)
    assert [r["skipped"] for r in rewinds(tmp_path)] == [[12], [22]]


def test_the_list_holds_without_a_guard_and_without_its_file(never_had: Path, tmp_path: Path):
    train(changed(), tmp_path, task=task({12: NAN, 22: HUGE}, stop=24), progress="none")
    (tmp_path / "spikes.jsonl").unlink()
    unguarded = dataclasses.replace(CONFIG, spikes=None)
    train(unguarded, tmp_path, task=task({12: NAN, 22: HUGE}), progress="none")
    assert exact(tmp_path) == exact(never_had)


def test_a_checkpoint_that_the_list_came_too_late_for_is_not_gone_on_from(
    never_had: Path, tmp_path: Path
):
    """What a kill between writing the list and deleting checkpoints leaves behind."""
    bad = {12: NAN, 22: HUGE}
    config = changed({"max_rewinds": 9}, save_every=4)
    lenient = dataclasses.replace(config, spikes=None)
    train(lenient, tmp_path, task=task(bad, stop=21), progress="none")
    assert Checkpointer(tmp_path / "checkpoints").all_steps()[-1] >= 20
    entry = {
        "step": 13, "batch": 12, "metric": "loss", "value": None, "median": None, "limit": None,
        "skipped": [12], "back_to": 10, "source": "memory", "time": 0.0,
    }  # fmt: skip
    (tmp_path / "spikes.jsonl").write_text(json.dumps(entry) + "\n")
    said: list[str] = []

    class Hearing(Quiet):
        def log(self, text: str) -> None:
            said.append(text)

    train(config, tmp_path, task=task(bad), progress=Hearing())
    assert any("checkpoint of step 20 is deleted" in text for text in said)
    assert exact(tmp_path) == exact(never_had)


def test_too_many_rewinds_stop_the_run_and_name_step_and_batch(tmp_path: Path):
    config = changed({"max_rewinds": 2})
    bad = {12: NAN, 15: HUGE, 18: HUGE}
    with pytest.raises(FornaxError) as caught:
        train(config, tmp_path, task=task(bad), progress="none")
    text = str(caught.value)
    assert text.startswith("step 17 (batch 18): loss ")
    assert "went back 2 times within 1000 steps already, from the steps 13 (batch 12), 15" in text
    assert "\n" not in text
    train(changed({"max_rewinds": 3}), tmp_path, task=task(bad), progress="none")
    assert len(rewinds(tmp_path)) == 3


def test_a_state_that_stays_bad_is_gone_further_back_from(tmp_path: Path):
    """The learning rate is too high for any batch: each rewind leaves out more."""
    optim = OptimConfig(optimizer=SGD(momentum=None), learning_rate=1e3, clip=())
    config = changed({"grad_norm": None, "loss": None, "max_rewinds": 4}, optim=optim)
    with pytest.raises(FornaxError, match="the cause is not a few bad batches"):
        train(config, tmp_path, task=task(), progress="none")
    found = rewinds(tmp_path)
    first = found[0]["step"]
    assert 6 <= first <= 10
    assert [len(r["skipped"]) for r in found] == [1, 1, 3, 5]
    assert [r["back_to"] for r in found[:2]] == [5, 5]
    assert (found[3]["back_to"], found[3]["source"]) == (0, "start")


def test_time_lost_to_spikes_is_told_from_steps_that_were_kept(tmp_path: Path):
    train(changed(), tmp_path, task=task({12: NAN, 22: HUGE}), progress="none")
    goodput = summarise(tmp_path / "goodput.jsonl")
    assert goodput.seconds["spikes"] > 0
    assert goodput.seconds["lost"] == 0
    lines = [json.loads(x) for x in (tmp_path / "goodput.jsonl").read_text().splitlines()]
    told = [(r["rewind_to"], r["batches"]) for r in lines if "rewind_to" in r]
    assert told == [(10, [12]), (20, [22])]


def test_the_report_tells_of_spikes(tmp_path: Path):
    train(changed(), tmp_path, task=task({12: NAN, 22: HUGE}), progress="none")
    page = (tmp_path / "report.html").read_text()
    assert "Loss spikes" in page
    assert "lost to loss spikes" in page


def test_batches_that_follow_the_weights_are_refused(tmp_path: Path):
    follows = dataclasses.replace(task(), post=PostTraining(follow=lambda step, model: None))
    with pytest.raises(ConfigError, match="TrainerConfig draws its batches from the model"):
        train(changed(), tmp_path, task=follows, progress="none")
