"""Training a mixture of experts: the routers' losses, the bias for the choice, any mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.mesh import MeshConfig
from fornax.models import Decoder, DecoderConfig, ExpertsConfig, router_losses
from fornax.models.routing import balanced_bias
from fornax.optim import SGD, Constant, OptimConfig
from fornax.train import next_token_loss
from fornax.train.config import TrainerConfig
from fornax.train.goodput import Ledger
from fornax.train.routing import settle_routing
from fornax.train.session import first_state, prepare
from fornax.train.task import Task

MODEL = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    initializer_range=0.3,
    mlp_pattern=("mlp", "experts", "experts"),
    experts=ExpertsConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=16,
        score="sigmoid",
        selection_bias=True,
        bias_update_rate=0.25,
        balance_loss=0.3,
        router_z_loss=0.2,
    ),
)
B, T = 8, 12


def _no_batches(split: str, hosts: Any) -> Any:
    raise AssertionError("not read here")


def _task(model: DecoderConfig) -> Task:
    return Task(
        build=lambda rngs: Decoder(model, rngs=rngs),
        loss=lambda decoder, batch, key: next_token_loss(decoder, batch),
        settle=settle_routing,
        batches=_no_batches,
    )


BASE = TrainerConfig(
    batch_size=B,
    mesh=MeshConfig(fsdp=1),
    optim=OptimConfig(
        optimizer=SGD(momentum=None), learning_rate=0.1, schedule=Constant(), clip=()
    ),
)


def rows() -> dict[str, np.ndarray]:
    """Two documents a row, the last row padding only."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (B, T), dtype=np.int32)
    ids = np.tile(np.array([1] * 5 + [2] * 7, np.int32), (B, 1))
    ids[-1] = 0
    positions = np.tile(np.array([*range(5), *range(7)], np.int32), (B, 1)) * (ids > 0)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segment_ids": ids,
        "positions": positions.astype(np.int32),
        "loss_weights": (ids > 0).astype(np.float32),
    }


@functools.cache
def step(
    model: DecoderConfig = MODEL, accumulate: int = 1, sizes: tuple[tuple[str, int], ...] = ()
) -> Any:
    """The state before a step, after it, and its metrics, on the host."""
    mesh = MeshConfig(**{"fsdp": 1, **dict(sizes)})
    config = dataclasses.replace(BASE, accumulate=accumulate, mesh=mesh)
    devices = jax.devices() if sizes else jax.devices()[:1]
    programs = prepare(config, _task(model), Ledger(), devices)
    state = first_state(config, programs)
    before = jax.device_get((state.params, state.other))
    state, metrics = programs.step(state, rows())
    return before, jax.device_get((state.params, state.other)), jax.device_get(metrics)


def _routing_of(params: Any, other: Any) -> Any:
    graphdef, held, rest = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0)), nnx.Param, ...)
    held, rest = nnx.State(held), nnx.State(rest)
    nnx.replace_by_pure_dict(held, params)
    nnx.replace_by_pure_dict(rest, other)
    batch = rows()
    hidden = nnx.merge(graphdef, held, rest).hidden_and_routing(
        batch["tokens"], batch["positions"], batch["segment_ids"], consecutive=True
    )
    return hidden[1]


@pytest.mark.slow
def test_the_bias_moves_by_the_load_of_the_whole_batch():
    """With micro-batches too; padding counts for no expert."""
    (params, other), _, _ = step()
    routing = _routing_of(params, other)
    np.testing.assert_array_equal(routing.tokens, [(B - 1) * T] * 2)
    assert float(jnp.sum(routing.assigned_E)) == 2 * 2 * (B - 1) * T
    bias = other["layers"]["experts"]["selection_bias"]
    want = balanced_bias(bias, routing.assigned_E, 0.25)
    assert np.any(np.asarray(want) != 0)
    for accumulate in (1, 4):
        _, (_, after), _ = step(accumulate=accumulate)
        np.testing.assert_array_equal(after["layers"]["experts"]["selection_bias"], want)


@pytest.mark.slow
def test_the_losses_of_routers_are_part_of_what_is_trained():
    (params, other), after, metrics = step()
    losses = router_losses(_routing_of(params, other))
    assert float(metrics["balance_loss"]) == pytest.approx(float(losses["balance"]), rel=1e-5)
    assert float(metrics["router_z_loss"]) == pytest.approx(float(losses["router_z"]), rel=1e-5)
    assert metrics["expert_load_max"] > 1 > metrics["expert_load_min"]
    assert 0 < metrics["router_entropy"] < np.log(8)
    without = dataclasses.replace(MODEL.experts, balance_loss=0.0, router_z_loss=0.0)
    _, plain, bare = step(dataclasses.replace(MODEL, experts=without))
    extra = 0.3 * metrics["balance_loss"] + 0.2 * metrics["router_z_loss"]
    assert float(metrics["loss"] - bare["loss"]) == pytest.approx(float(extra), rel=1e-4)
    router = [x[0]["layers"]["experts"]["router"]["kernel"] for x in (after, plain)]
    assert np.max(np.abs(router[0] - router[1])) > 1e-4


TIGHT = dataclasses.replace(
    MODEL,
    num_layers=2,
    mlp_pattern=None,
    experts=dataclasses.replace(MODEL.experts, capacity_factor=0.75),
)


@pytest.mark.slow
def test_drops_are_counted():
    """Of 8 experts each has room for ceil(0.75 2 12 / 8) = 3 tokens of a row of 12."""
    _, _, metrics = step(TIGHT)
    chosen, dropped = metrics["expert_tokens"], metrics["expert_tokens_dropped"]
    assert chosen.sum() == 2 * 2 * (B - 1) * T
    assert np.all(chosen - dropped <= 3 * (B - 1))
    assert np.all(dropped >= np.maximum(chosen - 3 * (B - 1), 0))
    assert 0.1 < metrics["expert_dropped"] < 0.6
    assert metrics["expert_dropped"] == pytest.approx(dropped.sum() / chosen.sum())


@pytest.mark.exhaustive
def test_micro_batches_drop_what_the_batch_does():
    """The balance loss of a micro-batch is its own, so that parameters differ a little."""
    _, (after, _), metrics = step(TIGHT)
    _, (in_parts, _), found = step(TIGHT, accumulate=4)
    assert "expert_dropped" not in step()[2]
    for name in ("expert_tokens", "expert_tokens_dropped"):
        np.testing.assert_array_equal(found[name], metrics[name])
    own, other = (x["layers"]["attention"]["o"]["kernel"] for x in (after, in_parts))
    np.testing.assert_allclose(own, other, atol=1e-3)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"fsdp": 2, "context": 2, "expert": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"fsdp": 2, "context": 4}, marks=pytest.mark.exhaustive),
        pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"stage": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"stage": 2, "expert": 2, "context": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_what_is_dropped_does_not_depend_on_the_mesh(sizes: dict[str, int]):
    _, (params, _), metrics = step(TIGHT)
    _, (on_mesh, _), found = step(TIGHT, sizes=tuple(sizes.items()))
    for name, value in metrics.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), on_mesh, params)


def test_the_loss_of_pretraining_drops_and_others_do_not():
    def metrics(balance: bool) -> set[str]:
        decoder = Decoder(TIGHT, rngs=nnx.Rngs(0))
        return set(next_token_loss(decoder, rows(), balance=balance).metrics)

    found = [set(jax.eval_shape(lambda b=b: dict.fromkeys(metrics(b), 0))) for b in (True, False)]
    assert found[0] - found[1] == {"expert_dropped"}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"fsdp": 8}, marks=pytest.mark.exhaustive),
        pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"expert": 4, "fsdp": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"expert": 2, "tensor": 2, "data": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_step_is_that_of_one_device(sizes: dict[str, int]):
    """Parameters after it, the bias, and every metric."""
    _, (params, other), metrics = step()
    _, (on_mesh, other_on_mesh), found = step(sizes=tuple(sizes.items()))
    for name, value in metrics.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), on_mesh, params)
    jax.tree.map(np.testing.assert_array_equal, other_on_mesh, other)
