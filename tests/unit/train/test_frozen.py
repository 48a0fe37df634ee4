"""Frozen parameters, streams that follow the weights, several shapes of rows.

Legend: B rows, P pairs, T tokens of a row, V vocabulary, D width, R rank.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.checkpoint import Checkpointer
from fornax.config import ConfigError, ShardingError
from fornax.mesh import MeshConfig
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.train import EvalConfig, read_metrics, train
from fornax.train.config import LogConfig, TrainerConfig
from fornax.train.goodput import Ledger
from fornax.train.session import Programs, first_state, prepare, start
from fornax.train.state import as_tree
from fornax.train.task import Loss, PostTraining, Task

V, D, R, T = 16, 8, 2, 8


class Delta(nnx.Param):
    """What is trained beside a frozen matrix."""


class Adapted(nnx.Module):
    """An embedding, a frozen matrix with a low-rank change, a running count."""

    def __init__(self, rngs: nnx.Rngs):
        draw = jax.random.normal
        self.embed = nnx.Param(draw(rngs.params(), (V, D)), axes=("vocab", "embed"))
        self.w = nnx.Param(draw(rngs.params(), (D, V)), axes=("embed", "vocab"))
        self.a = Delta(draw(rngs.params(), (D, R)), axes=("embed", None))
        self.b = Delta(jnp.zeros((R, V)), axes=(None, "vocab"))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32), axes=())


def nll(model: Any, batch: Any, key: jax.Array) -> Loss:
    """Weighted negative log-likelihood of targets, for tokens [..., T]."""
    model.calls.set_value(model.calls.get_value() + 1)
    x = model.embed[...][batch["tokens"]]
    logits = x @ model.w[...] + (x @ model.a[...]) @ model.b[...]
    logps = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logps, batch["targets"][..., None], axis=-1)[..., 0]
    weight = jnp.sum(batch["loss_weights"])
    return Loss(total=-jnp.sum(picked * batch["loss_weights"]), weight=weight, metrics={})


def draw_rows(seed: int, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, V, shape, dtype=np.int32),
        "targets": rng.integers(0, V, shape, dtype=np.int32),
        "loss_weights": rng.exponential(size=shape).astype(np.float32) ** 3,
    }


class Stream:
    """Rows [4, T]; draws shorter rows every third time when `ragged`."""

    def __init__(self, ragged: bool = False):
        self.read, self.ragged = 0, ragged

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self.read += 1
        short = self.ragged and self.read % 3 == 0
        return draw_rows(self.read, (4, T // 2 if short else T))

    def state(self) -> dict[int, dict]:
        return {0: {"read": self.read}}

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        self.read = state[0]["read"]

    def close(self) -> None:
        pass


TASK = Task(
    build=Adapted, loss=nll, batches=lambda split, hosts: Stream(), post=PostTraining(trained=Delta)
)
CONFIG = TrainerConfig(
    steps=4,
    batch_size=4,
    save_every=2,
    mesh=MeshConfig(data=1, fsdp=1, tensor=-1),
    optim=OptimConfig(optimizer=AdamW(), learning_rate=0.1, schedule=Constant()),
    log=LogConfig(tensorboard=False),
)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)


def begin(config: TrainerConfig, task: Task = TASK, devices: int = 1) -> tuple[Programs, Any]:
    programs = prepare(config, task, Ledger(), jax.devices()[:devices])
    return programs, first_state(config, programs)


def names(tree: Any) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_frozen_parameters_are_read_and_left_where_they_are():
    programs, state = begin(CONFIG)
    assert names(state.params) == {"['a']", "['b']"}
    assert names(programs.frozen) == {"['embed']", "['w']"}
    assert not any("embed" in name or "'w'" in name for name in names(as_tree(state)))
    frozen = jax.tree.leaves(programs.frozen)
    before = [np.array(x) for x in frozen]
    where = [x.unsafe_buffer_pointer() for x in frozen]
    first = jax.device_get(state.params)
    for step in range(2):
        state, metrics = programs.step(state, draw_rows(step, (4, T)))
    assert np.isfinite(metrics["loss"])
    assert not np.allclose(state.params["b"], first["b"])
    assert jax.tree.leaves(programs.frozen) == frozen
    assert [x.unsafe_buffer_pointer() for x in frozen] == where
    for x, y in zip(frozen, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_step_returns_no_frozen_array():
    programs, _ = begin(CONFIG)
    lowered = programs.lower_step(programs.shapes_of(draw_rows(0, (4, T))))
    memory: Any = lowered.compile().memory_analysis()
    frozen = sum(x.nbytes for x in jax.tree.leaves(programs.frozen))
    state = sum(x.dtype.itemsize * x.size for x in jax.tree.leaves(programs.abstract))
    assert memory.alias_size_in_bytes >= 0.9 * state - 64  # the state is taken over
    assert memory.output_size_in_bytes < state + frozen / 2


@pytest.mark.slow
def test_a_resumed_run_takes_the_base_from_pretrained_and_the_rest_from_the_checkpoint(
    tmp_path: Path,
):
    """`pretrained` draws with another seed than `build`, so that the two cannot be confused."""
    loaded: list[int] = []

    def pretrained(mesh: Any, rules: Any) -> Adapted:
        loaded.append(1)
        return Adapted(nnx.Rngs(77))

    task = dataclasses.replace(TASK, pretrained=pretrained)
    whole = train(CONFIG, tmp_path / "whole", task=task, progress="none")
    train(dataclasses.replace(CONFIG, steps=2), tmp_path / "cut", task=task, progress="none")
    assert len(loaded) == 2
    again = train(CONFIG, tmp_path / "cut", task=task, accept_changes=["steps"], progress="none")
    assert len(loaded) == 3
    assert again.step == whole.step == 4
    ends = [
        Checkpointer(tmp_path / run / "checkpoints").restore(
            as_tree(prepare(CONFIG, task, Ledger()).abstract)
        )
        for run in ("whole", "cut")
    ]
    for x, y in zip(*(jax.tree.leaves(end.state) for end in ends), strict=True):
        np.testing.assert_array_equal(x, y)
    stored = sum(f.stat().st_size for f in (tmp_path / "cut" / "checkpoints").rglob("*"))
    assert stored < 1_000_000


def test_without_pretrained_weights_the_base_is_drawn_again_from_the_seed(tmp_path: Path):
    programs, _ = begin(CONFIG)
    config = dataclasses.replace(CONFIG, steps=1)
    train(config, tmp_path, task=TASK, progress="none")
    again = prepare(config, TASK, Ledger(), jax.devices()[:1])
    start(config, again, Checkpointer(tmp_path / "checkpoints"))
    for name in ("embed", "w"):
        np.testing.assert_array_equal(again.frozen[name], programs.frozen[name])


def test_a_filter_that_finds_nothing_is_refused():
    class Other(nnx.Param):
        pass

    with pytest.raises(ConfigError, match="no parameter"):
        prepare(CONFIG, dataclasses.replace(TASK, post=PostTraining(trained=Other)), Ledger())


@pytest.mark.slow
def test_pairs_give_one_update_however_split_and_laid_out():
    """One device and one batch, against eight devices, context parallelism and accumulation."""
    rows = draw_rows(3, (4, 2, T))
    rows["margin"] = np.ones((4,), np.float32)
    rows["ids"] = np.ones((4, 3), np.int32)
    ends = []
    spread = MeshConfig(data=2, fsdp=1, context=2, tensor=2)
    for mesh, accumulate, devices in [(CONFIG.mesh, 1, 1), (spread, 2, 8)]:
        config = dataclasses.replace(CONFIG, mesh=mesh, accumulate=accumulate)
        programs, state = begin(config, devices=devices)
        placed = programs.shapes_of(rows)
        lengths = [name for name, s in placed.items() if "context" in str(s.sharding.spec)]
        assert sorted(lengths) == ["loss_weights", "targets", "tokens"]
        state, metrics = programs.step(state, rows)
        ends.append((jax.device_get(state.params), float(metrics["loss"])))
    assert not programs.frozen["w"].sharding.is_fully_replicated
    for params, loss in ends[1:]:
        assert loss == pytest.approx(ends[0][1], rel=1e-5)
        np.testing.assert_allclose(params["b"], ends[0][0]["b"], rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(params["a"], ends[0][0]["a"], rtol=2e-4, atol=1e-6)


def test_each_shape_of_rows_is_compiled_once_and_counted(tmp_path: Path):
    task = dataclasses.replace(TASK, batches=lambda split, hosts: Stream(ragged=True))
    config = dataclasses.replace(CONFIG, steps=7, eval=EvalConfig(every=5, batches=3))
    train(config, tmp_path, task=task, progress="none")
    counts = [r["compilations"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert counts == [1, 1, 2, 2, 2, 4, 4]  # after step 5: the evaluation's two shapes


def test_rows_that_do_not_divide_are_refused_with_a_number_that_does():
    programs, state = begin(dataclasses.replace(CONFIG, accumulate=2))
    with pytest.raises(ShardingError, match="multiple of 2"):
        programs.step(state, draw_rows(0, (3, T)))


def test_a_stream_follows_the_weights_and_its_numbers_stand_with_their_step(tmp_path: Path):
    seen: list[tuple[int, float]] = []
    stream = Stream()

    def follow(step: int, current: Any) -> None:
        model = current()
        assert isinstance(model, Adapted)
        seen.append((step, float(jnp.sum(model.b[...] ** 2))))

    task = dataclasses.replace(
        TASK,
        batches=lambda split, hosts: stream,
        post=dataclasses.replace(
            TASK.post, follow=follow, observe=lambda: {"rows_read": float(stream.read)}
        ),
    )
    train(CONFIG, tmp_path, task=task, progress="none")
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    norms = [norm for _, norm in seen]
    assert norms[0] == 0
    assert norms == sorted(set(norms))
    assert [r["rows_read"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
