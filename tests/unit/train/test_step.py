"""One step: exact under accumulation, skips cleanly, random keys never repeat.

Legend: B rows, I inputs, O outputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.mesh import DtypePolicy
from fornax.optim import EMA, SGD, AdamW, Constant, OptimConfig
from fornax.train.config import TrainerConfig
from fornax.train.goodput import Ledger
from fornax.train.guard import SkipConfig
from fornax.train.session import Programs, first_state, prepare
from fornax.train.state import as_tree
from fornax.train.step import accepted
from fornax.train.task import Loss, Task

B, I, O = 16, 5, 3  # noqa: E741


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        init = jax.random.normal(rngs.params(), (I, O), dtype)
        self.w = nnx.Param(init, axes=("embed", None))
        self.b = nnx.Param(jnp.zeros((O,), dtype), axes=(None,))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32), axes=())


def squared(model: Any, batch: Any, key: jax.Array) -> Loss:
    model.calls.set_value(model.calls.get_value() + 1)
    y_BO = jnp.einsum("BI,IO->BO", batch["x"], model.w[...].astype(jnp.float32)) + model.b[...]
    loss_B = jnp.sum((y_BO - batch["y"]) ** 2, axis=1)
    weight = jnp.sum(batch["weight"])
    return Loss(
        total=jnp.sum(loss_B * batch["weight"]),
        weight=weight,
        metrics={
            "first_row": (jnp.sum(batch["x"][:, 0] * batch["weight"]), weight),
            "drawn": (jax.random.uniform(key) * weight, weight),
        },
        maxima={"highest": jnp.max(batch["x"]) - 100},
    )


def no_batches(split: str, hosts: Any) -> Any:
    raise AssertionError("not read here")


TASK = Task(build=Linear, loss=squared, batches=no_batches, unit="rows")
BASE = TrainerConfig(
    batch_size=B,
    optim=OptimConfig(
        optimizer=SGD(momentum=None), learning_rate=0.1, schedule=Constant(), clip=()
    ),
)


def rows(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of very different size, so that micro-batches are far from equal."""
    rng = np.random.default_rng(seed)
    weight = rng.exponential(1.0, B).astype(np.float32) ** 3
    weight[[1, 5, 9, 13]] = 0  # with four micro-batches one has no weight at all
    return {
        "x": rng.normal(size=(B, I)).astype(np.float32),
        "y": rng.normal(size=(B, O)).astype(np.float32),
        "weight": weight,
    }


def begin(config: TrainerConfig, task: Task = TASK) -> tuple[Programs, Any]:
    programs = prepare(config, task, Ledger(), jax.devices()[:1])
    return programs, first_state(config, programs)


def oracle(params: Any, batch: dict[str, np.ndarray]) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients in float64, written out by hand."""
    w, b = (np.asarray(params[name], np.float64) for name in ("w", "b"))
    x, y, weight = (batch[name].astype(np.float64) for name in ("x", "y", "weight"))
    error = x @ w + b - y
    share = weight / weight.sum()
    loss = float((share * (error**2).sum(1)).sum())
    pull = 2 * share[:, None] * error
    return loss, x.T @ pull, pull.sum(0)


@pytest.mark.parametrize("accumulate", [1, 2, 4, 16])
def test_accumulation_is_exact_under_unequal_weights(accumulate: int):
    config = dataclasses.replace(BASE, accumulate=accumulate)
    programs, state = begin(config)
    before = jax.device_get(state.params)
    loss, dw, db = oracle(before, rows())
    state, metrics = programs.step(state, rows())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(
        float(np.sqrt((dw**2).sum() + (db**2).sum())), rel=1e-6
    )
    np.testing.assert_allclose(state.params["w"], before["w"] - 0.1 * dw, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(state.params["b"], before["b"] - 0.1 * db, rtol=1e-6, atol=1e-6)
    expected = np.average(rows()["x"][:, 0], weights=rows()["weight"])
    assert float(metrics["first_row"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["weight"]) == pytest.approx(rows()["weight"].sum(), rel=1e-6)
    assert float(metrics["highest"]) == np.float32(rows()["x"].max()) - np.float32(100)


def test_a_mean_of_micro_batch_means_would_be_caught():
    batch = rows()
    before = jax.device_get(begin(BASE)[1].params)
    exact = oracle(before, batch)[0]
    parts = [{k: v[i::4] for k, v in batch.items()} for i in (0, 2, 3)]
    naive = np.mean([oracle(before, part)[0] for part in parts])
    assert abs(naive - exact) > 0.05 * exact


def test_untrained_arrays_pass_through_every_micro_batch():
    programs, state = begin(dataclasses.replace(BASE, accumulate=4))
    for step in (1, 2):
        state, _ = programs.step(state, rows(step))
    assert int(state.other["calls"]) == 8


def test_keys_differ_between_steps_and_do_not_depend_on_history():
    programs, state = begin(BASE)
    drawn = []
    for _ in range(4):
        state, metrics = programs.step(state, rows())
        drawn.append(float(metrics["drawn"]))
    assert len(set(drawn)) == 4
    programs, state = begin(BASE)
    bad = {**rows(), "x": np.full((B, I), np.nan, np.float32)}
    state, _ = programs.step(state, bad)
    _, metrics = programs.step(state, rows())
    assert float(metrics["drawn"]) == drawn[1]


def test_keys_differ_between_micro_batches():
    """With equal keys the mean over micro-batches would be the draw of a single one."""
    programs, state = begin(BASE)
    _, one = programs.step(state, rows())
    programs, state = begin(dataclasses.replace(BASE, accumulate=4))
    _, four = programs.step(state, rows())
    assert float(one["drawn"]) != pytest.approx(float(four["drawn"]), rel=1e-3)


@pytest.mark.parametrize("optimizer", [AdamW(), SGD()])
def test_a_skipped_step_moves_on_and_leaves_everything_else(optimizer: Any):
    config = dataclasses.replace(
        BASE, optim=dataclasses.replace(BASE.optim, optimizer=optimizer, ema=EMA())
    )
    programs, state = begin(config)
    state, _ = programs.step(state, rows())
    before = jax.device_get(as_tree(state))
    bad = rows(1)
    bad["x"][3, 2] = np.inf
    state, metrics = programs.step(state, bad)
    after = jax.device_get(as_tree(state))
    assert float(metrics["skipped"]) == 1
    assert (after["step"], after["updates"]) == (2, 1)
    for name in ("params", "other", "optimizer", "guard", "rng"):
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
    state, metrics = programs.step(state, rows(2))
    assert float(metrics["skipped"]) == 0
    assert int(state.updates) == 2


@pytest.mark.parametrize("branch", [True, False], ids=["branch", "elements"])
def test_a_rejected_update_is_kept_out_to_the_bit(branch: bool):
    """On TPUs element by element: what is not finite there touches nothing."""
    programs, state = begin(dataclasses.replace(BASE, optim=OptimConfig(optimizer=AdamW())))
    optim, kept = programs.parts.optim, (state.params, state.optimizer)

    @jax.jit
    def choose(accept: jax.Array, scale: jax.Array) -> Any:
        grads = jax.tree.map(lambda p: p * scale, state.params)
        return accepted(accept, lambda: optim.update(grads, kept[1], kept[0]), kept, branch=branch)

    for a, b in zip(
        jax.tree.leaves(choose(jnp.array(False), jnp.float32(jnp.nan))),
        jax.tree.leaves(kept),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    new, _ = choose(jnp.array(True), jnp.float32(1))
    moved = jax.tree.map(lambda a, b: bool((a != b).all()), new, state.params)
    assert jax.tree.leaves(moved) == [False, True]  # the bias is zero, and so is its gradient


def test_an_outlier_is_skipped_once_enough_norms_are_known():
    skip = SkipConfig(outlier_factor=5.0, window=8, warmup=4)
    programs, state = begin(dataclasses.replace(BASE, skip=skip))
    skipped = []
    for step in range(8):
        batch = rows(step)
        if step == 6:
            batch["y"] *= 1000
        state, metrics = programs.step(state, batch)
        skipped.append(bool(metrics["skipped"]))
    assert skipped == [False, False, False, False, False, False, True, False]


def test_a_batch_without_weight_changes_nothing():
    programs, state = begin(BASE)
    before = jax.device_get(state.params)
    state, metrics = programs.step(state, {**rows(), "weight": np.zeros(B, np.float32)})
    assert (float(metrics["loss"]), float(metrics["skipped"])) == (0.0, 1.0)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_bfloat16_parameters_stay_bfloat16_and_sums_are_float32():
    task = dataclasses.replace(TASK, build=lambda rngs: Linear(rngs, jnp.bfloat16))
    config = dataclasses.replace(
        BASE,
        accumulate=4,
        dtypes=DtypePolicy(params="bfloat16", compute="bfloat16"),
        optim=dataclasses.replace(BASE.optim, optimizer=AdamW()),
    )
    programs, state = begin(config, task)
    loss, *_ = oracle(jax.device_get(state.params), rows())
    state, metrics = programs.step(state, rows())
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-3)


def test_two_runs_are_equal_bit_for_bit():
    found = []
    for _ in range(2):
        programs, state = begin(dataclasses.replace(BASE, accumulate=2))
        for step in range(3):
            state, metrics = programs.step(state, rows(step))
        found.append(jax.device_get((as_tree(state), metrics)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_evaluation_reads_the_averaged_parameters():
    optim = dataclasses.replace(BASE.optim, ema=EMA(decay=0.5))
    programs, state = begin(dataclasses.replace(BASE, optim=optim))
    before = jax.device_get(state.params)
    state, _ = programs.step(state, rows())
    after = jax.device_get(state.params)
    average = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, before, after)
    sums = programs.evaluate(state, rows(1))
    got = float(sums.total) / float(sums.weight)
    assert got == pytest.approx(oracle(average, rows(1))[0], rel=1e-5)
    assert got != pytest.approx(oracle(after, rows(1))[0], rel=1e-3)
