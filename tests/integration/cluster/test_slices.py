"""`fornax launch --slices`: DiLoCo between groups of processes, and the loss of one of them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.checkpoint import Checkpointer
from fornax.config import from_mapping, worker_record
from fornax.config.jsonl import read_json_lines
from fornax.data import Hosts
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.diloco import OuterOptimizer
from fornax.train.session import first_state, prepare

pytestmark = [pytest.mark.slow]

STREAMING = {
    "sync_every": 6,
    "num_fragments": 2,
    "fragment_sync_delay": 1,
    "fragment_update_alpha": 0.5,
    "exchange_dtype": "e3m0",
}
CHANGES: dict[str, Any] = {"steps": 14, "save_every": 4, "eval": {}}
SLICES = ("--slices", "2", "--no-spares")


def losses(run_dir: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_json_lines(run_dir / "metrics.jsonl")}


def parameters(run_dir: Path) -> dict[str, np.ndarray]:
    """The parameters and the outer state of the newest checkpoint."""
    checkpointer = Checkpointer(run_dir / "checkpoints")
    step = checkpointer.latest_step()
    assert step is not None
    (path,) = (run_dir / "checkpoints").glob(str(step))
    found = {}
    import tensorstore as ts

    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path / 'state'}/"}}
    keys = ts.KvStore.open(base).result().list().result()
    for key in sorted({k.rpartition(b"/")[0].decode() for k in keys if k.endswith(b"zarr.json")}):
        if key.startswith(("params.", "outer.")):
            spec = {"driver": "zarr3", "kvstore": {**base, "path": f"{key}/"}}
            found[key] = ts.open(spec, open=True).result().read().result()
    assert found
    return found


def simulated(settings: dict[str, Any], **changes: Any) -> list[dict[int, float]]:
    """The losses of two slices, one after the other in this process, and nothing sent."""
    config = from_mapping(TrainConfig, {**settings, **CHANGES, **changes})
    diloco = config.diloco
    assert diloco is not None
    task = pretrain_task(config)
    programs = prepare(config, task, Ledger(), jax.devices()[:1])
    optimizer = OuterOptimizer(diloco, programs.parts, programs.abstract.params)
    states = [first_state(config, programs) for _ in range(2)]
    outer = [optimizer.init(state.params) for state in states]
    streams = [task.batches("train", Hosts(index=n, count=2, multiple=2)) for n in range(2)]
    found: list[dict[int, float]] = [{}, {}]
    flight: tuple[int, int, jax.Array] | None = None

    def exchanged(number: int) -> jax.Array:
        sent = [
            optimizer.contribution(o, s.params, number) for o, s in zip(outer, states, strict=True)
        ]
        return jnp.stack(sent)

    def taken_in(number: int, gathered: jax.Array, alpha: float) -> None:
        for n in range(2):
            outer[n], params = optimizer.apply(
                outer[n], states[n].params, number, gathered, jnp.ones(2), alpha
            )
            states[n] = type(states[n])(**{**vars(states[n]), "params": params})

    for step in range(1, config.steps + 1):
        for n in range(2):
            states[n], metrics = programs.step(states[n], next(streams[n]))
            found[n][step] = float(metrics["loss"])
        number = diloco.due(step)
        if number is not None and step < config.steps:
            flight = (step + diloco.fragment_sync_delay, number, exchanged(number))
        if flight is not None and (flight[0] == step or step == config.steps):
            taken_in(flight[1], flight[2], diloco.fragment_update_alpha)
            flight = None
    for stream in streams:
        stream.close()
    return found


@pytest.mark.parametrize(
    "diloco",
    [pytest.param({"sync_every": 4}, marks=pytest.mark.exhaustive), STREAMING],
    ids=["diloco", "streaming"],
)
def test_two_slices_are_a_simulation_of_them(
    launch: Any, settings: dict[str, Any], diloco: dict[str, Any]
):
    """Bit for bit; and at the end all parameters and the outer state are the same."""
    run = launch(hosts=1, flags=SLICES, diloco=diloco, **CHANGES)
    code, output = run.finish()
    assert code == 0, output
    slices = [run.run_dir / f"slice-{n}" for n in range(2)]
    expected = simulated(settings, diloco=diloco, mesh={"data": -1, "fsdp": 1})
    assert [losses(each) for each in slices] == expected
    one, other = map(parameters, slices)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert expected[0] != expected[1]
    last = read_json_lines(run.run_dir / "events.jsonl")[-1]
    assert last["state"] == "ended"
    assert last["bytes"] > 0
    assert not run.descendants()


@pytest.mark.exhaustive
def test_two_slices_of_two_hosts_stop_and_go_on_as_if_they_never_had(
    launch: Any, settings: dict[str, Any]
):
    """Ctrl-C stops them at one step; the losses are those of a run that was not stopped."""
    whole = launch("whole", hosts=2, flags=SLICES, diloco=STREAMING, **CHANGES)
    code, output = whole.finish()
    assert code == 0, output
    run = launch("parts", hosts=2, flags=SLICES, diloco=STREAMING, **CHANGES)
    wait_for_step(run, 1, 5)
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    stopped = [max(losses(run.run_dir / f"slice-{n}")) for n in range(2)]
    assert stopped[0] == stopped[1] < CHANGES["steps"]
    again = launch("parts", hosts=2, flags=SLICES, diloco=STREAMING, **CHANGES)
    code, output = again.finish()
    assert code == 0, output
    for n in range(2):
        assert losses(again.run_dir / f"slice-{n}") == losses(whole.run_dir / f"slice-{n}")
        one, other = (parameters(r.run_dir / f"slice-{n}") for r in (again, whole))
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.fault
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_slice_that_is_killed_stops_no_other_and_comes_back(launch: Any, hosts: int):
    run = launch(
        hosts=hosts,
        flags=SLICES,
        diloco={"sync_every": 3},
        steps=4000,
        save_every=500,
        log={"tensorboard": False, "every": 1},
    )
    wait_for_step(run, 0, 6)
    killed = wait_for_step(run, 1, 6)
    os.kill(killed, signal.SIGKILL)
    before = max(losses(run.run_dir / "slice-0"))
    wait_for_event(run, "slice 1 resumes at step")
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == 143, output
    said = [event["why"] for event in read_json_lines(run.run_dir / "events.jsonl")]
    (lost,) = (n for n, text in enumerate(said) if "slice 1 is gone; 0 continues" in text)
    (back,) = (n for n, text in enumerate(said) if "slice 1 resumes at step" in text)
    assert lost < back
    alone = read_json_lines(run.run_dir / "slice-0" / "metrics.jsonl")
    assert [r["step"] for r in alone] == [*range(1, len(alone) + 1)]  # it never went back
    assert {r.get("slices") for r in alone} >= {1, 2}
    assert max(losses(run.run_dir / "slice-0")) > before
    one, other = (parameters(run.run_dir / f"slice-{n}") for n in range(2))
    for name in (name for name in one if name.startswith("outer.")):
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert not run.descendants()


def test_slices_without_diloco_and_diloco_without_slices_are_refused(launch: Any, finish: Any):
    run = launch(hosts=1, flags=SLICES, **CHANGES)
    code, output = run.finish()
    assert code == 2, output
    assert "add diloco to it, such as diloco: {sync_every: 100}" in output
    code, output = finish(run.run_dir.parent / "alone", diloco={"sync_every": 4})
    assert code == 2, output
    assert "start the run with fornax launch --slices 2 -- train" in output


def wait_for_step(run: Any, number: int, step: int) -> int:
    """Until a slice's rank 0 has entered a step; returns its process."""
    path = run.run_dir / f"slice-{number}" / "cluster" / "rank-0.record"
    deadline = time.monotonic() + 180
    while True:
        state = worker_record.read(path)
        if state is not None and state.entered_step >= step:
            return state.pid
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_event(run: Any, text: str) -> None:
    deadline = time.monotonic() + 180
    while not any(text in e["why"] for e in read_json_lines(run.run_dir / "events.jsonl")):
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline
        time.sleep(0.05)
