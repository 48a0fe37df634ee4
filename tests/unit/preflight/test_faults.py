"""Faults planted in the trainer, one at a time: each is found, by the check that is for it."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fornax import kernels
from fornax.checkpoint import Checkpointer
from fornax.config import ConfigError
from fornax.kernels import linear_cross_entropy
from fornax.kernels._attention import native, ring
from fornax.kernels._attention.ring import Ring
from fornax.mesh import current_mesh
from fornax.models import attend, attention, dispatch, experts, latent, pipeline, routing
from fornax.models.layer_inputs import LayerInputs, LayerScale
from fornax.train import step as train_step
from fornax.train.step import sum_gradients
from fornax.train.tasks import pretrain

from .conftest import EXPERTS, GATED_DELTA, GEMMA3, GEMMA4, LATENT, MAMBA2, QWEN3, RunChecks

TENSOR = {"mesh": {"fsdp": 1, "tensor": 2}}
DATA = {"mesh": {"fsdp": 1, "data": 2}}
FLOAT32 = {"dtypes": {}}


def failed(report: Any) -> dict[str, str]:
    """Name to detail of the checks that failed, by their figures: no fault is planted badly."""
    found = {check.name: check.detail for check in report.checks if not check.ok}
    assert not [detail for detail in found.values() if "AttributeError" in detail]
    return found


@pytest.mark.slow
def test_key_heads_on_the_wrong_axis(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    """Queries divided by heads, keys not: each device pairs its queries with the wrong keys."""

    def over_mesh(attend: Any, q: Any, k: Any, v: Any, tokens: Any, sinks: Any) -> Any:
        mesh = current_mesh()
        if mesh is None or mesh.size == 1:
            return attend(q, k, v, tokens, sinks)
        by_head, whole = PartitionSpec(None, None, "tensor"), PartitionSpec()
        return jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(by_head, whole, whole, (whole,) * len(tokens), whole),
            out_specs=by_head,
            check_vma=False,
        )(q, k, v, tokens, sinks)

    monkeypatch.setattr(native, "over_mesh", over_mesh)
    report = run_checks("mesh", **TENSOR, **FLOAT32)
    assert "tensor=2" in failed(report)
    assert report.first_failure is not None
    assert report.first_failure.name == "tensor=2"


RING = {
    "model": {**QWEN3, "num_layers": 1, "context_exchange": "ring"},
    "mesh": {"fsdp": 1, "context": 2},
    "accumulate": 1,
    "remat": "none",
    **FLOAT32,
}


def not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device leaves its own keys out and attends to those of the others."""
    _stops(monkeypatch, lambda hop: hop.shift > 0)


def not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values do not get to the last device."""
    _stops(monkeypatch, lambda hop: hop.shift == 0)


def _stops(monkeypatch: pytest.MonkeyPatch, computes: Callable[[Any], bool]) -> None:
    hops = Ring._hops

    def some(self: Any) -> Any:
        for hop in hops(self):
            there = hop.pairs * np.int32([1, 1, computes(hop)])
            yield hop._replace(pairs=there)

    monkeypatch.setattr(Ring, "_hops", some)


def stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys and values are not brought home from the last device."""
    way = ring._way

    def one_way(static: Any) -> Any:
        for hop, send in way(static):
            last = hop is static.ring.hops[-1]
            yield hop, (lambda arrays, home=False: arrays) if last else send

    monkeypatch.setattr(ring, "_way", one_way)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        not_its_own,
        pytest.param(not_the_last, marks=pytest.mark.exhaustive),
        pytest.param(stays_there, marks=pytest.mark.exhaustive),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_fault_in_a_ring(
    plant: Callable[[pytest.MonkeyPatch], None],
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
):
    plant(monkeypatch)
    assert set(failed(run_checks("mesh", **RING))) == {"context=2"}


@pytest.mark.exhaustive
def test_a_ring_without_a_fault_passes(run_checks: RunChecks):
    assert not failed(run_checks("mesh", **RING))


@pytest.mark.slow
def test_a_loss_without_its_psum(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    """Each device keeps the sum over its own tokens."""

    def local(x: Any, w: Any, targets: Any, weights: Any, **options: Any) -> Any:
        mesh = current_mesh()
        if mesh is None or mesh.size == 1:
            return linear_cross_entropy(x, w, targets, weights, **options)
        rows, whole = PartitionSpec("data"), PartitionSpec()
        options = {**options, "implementation": "reference"}
        return jax.shard_map(
            functools.partial(linear_cross_entropy, **options),
            mesh=mesh,
            in_specs=(rows, whole, rows, rows),
            out_specs=whole,
            check_vma=False,
        )(x, w, targets, weights)

    monkeypatch.setattr(pretrain, "linear_cross_entropy", local)
    found = failed(run_checks("mesh", **DATA, **FLOAT32))
    assert "data=2" in found
    assert "weights of the batch add up to" in found["data=2"] or "loss differs" in found["data=2"]


@pytest.mark.exhaustive
def test_an_attention_that_ignores_segments(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    fill = native.fill

    def one_document(inputs: Any) -> tuple[jax.Array, ...]:
        *positions, segments_q, segments_k = fill(inputs)
        return (*positions, jnp.ones_like(segments_q), jnp.ones_like(segments_k))

    monkeypatch.setattr(native, "fill", one_document)
    found = failed(run_checks("packing", "attention", **DATA, **FLOAT32))
    assert "documents in a row, on one device" in found
    assert "native on 640 tokens" in found
    assert "xla on 640 tokens" not in found


@pytest.mark.exhaustive
def test_accumulation_by_means(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    """The mean of the micro-batches' means, each micro-batch counting the same."""

    def by_means(parts: Any, params: Any, other: Any, batch: Any, key: Any) -> Any:
        if parts.accumulate == 1:
            return sum_gradients(parts, params, other, batch, key)
        one = dataclasses.replace(parts, accumulate=1)
        micro_batches = [
            {name: x[number :: parts.accumulate] for name, x in batch.items()}
            for number in range(parts.accumulate)
        ]
        found = [sum_gradients(one, params, other, micro, key) for micro in micro_batches]
        weight = sum(loss.weight for loss, _, _ in found)
        share = weight / parts.accumulate
        loss = dataclasses.replace(
            found[0][0],
            total=sum(loss.total / loss.weight * share for loss, _, _ in found),
            weight=weight,
        )
        grads = [
            jax.tree.map(lambda g, w=loss.weight: g / w * share, grads) for loss, _, grads in found
        ]
        return loss, other, jax.tree.map(lambda *g: sum(g), *grads)

    monkeypatch.setattr(train_step, "sum_gradients", by_means)
    report = run_checks("mesh", "accumulation", **DATA, **FLOAT32)
    assert "2 unequal micro-batches are one batch" in failed(report)
    assert "data=2" not in failed(report)
    assert report.first_failure is not None
    assert report.first_failure.group == "accumulation"


def half_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's logits rounded to bfloat16."""
    choose = routing.choose

    def rounded(logits_ME: jax.Array, *rest: Any) -> Any:
        return choose(logits_ME.astype(jnp.bfloat16).astype(jnp.float32), *rest)

    monkeypatch.setattr(experts, "choose", rounded)


def leaking_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias for the choice of experts in their weights too."""
    choose = routing.choose

    def leaking(logits_ME: jax.Array, config: Any, bias_E: jax.Array) -> Any:
        choice = choose(logits_ME, config, bias_E)
        weights_Mk = jnp.take_along_axis(choice.scores_ME + bias_E, choice.experts_Mk, axis=-1)
        weights_Mk = config.scale * weights_Mk / jnp.sum(weights_Mk, axis=-1, keepdims=True)
        return dataclasses.replace(choice, weights_Mk=weights_Mk)

    monkeypatch.setattr(experts, "choose", leaking)


def other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of an expert multiplied by the next one's matrices."""

    def rolled_experts(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return kernels.grouped_matmul(x, jnp.roll(w, 1, axis=0), sizes)

    monkeypatch.setattr(
        dispatch, "kernels", SimpleNamespace(**{**vars(kernels), "grouped_matmul": rolled_experts})
    )


def lost_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of the last expert is not computed."""

    def cut(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return kernels.grouped_matmul(x, w, sizes.at[-1].set(jnp.maximum(sizes[-1] - 1, 0)))

    monkeypatch.setattr(
        dispatch, "kernels", SimpleNamespace(**{**vars(kernels), "grouped_matmul": cut})
    )


def doubled_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of those sorted by expert takes the second one's place too."""
    permute = dispatch._permute

    def doubled(x_AD: jax.Array, order_A: jax.Array, inverse_A: jax.Array) -> jax.Array:
        return permute(x_AD.at[1].set(x_AD[0]), order_A, inverse_A)

    monkeypatch.setattr(dispatch, "_permute", doubled)


def lost_in_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device gives no place to the last row that the others send it."""
    exchange = kernels.exchange_rows

    def losing(x: jax.Array, counts: jax.Array, *rest: Any) -> jax.Array:
        y = exchange(x, counts, *rest)
        received = jnp.sum(counts[:, jax.lax.axis_index(rest[-1])])
        return jnp.where(jnp.arange(len(y))[:, None] == received - 1, 0, y)

    _exchange_by(monkeypatch, losing)


def doubled_in_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row that a device receives is the first one again."""
    exchange = kernels.exchange_rows

    def doubling(x: jax.Array, counts: jax.Array, *rest: Any) -> jax.Array:
        y = exchange(x, counts, *rest)
        return y.at[1].set(y[0])

    _exchange_by(monkeypatch, doubling)


def _exchange_by(monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., jax.Array]) -> None:
    planted = SimpleNamespace(**{**vars(kernels), "exchange_rows": exchange})
    monkeypatch.setattr(dispatch, "kernels", planted)


def next_devices_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for the experts of one device are sent to the next."""
    exchange = kernels.exchange_rows

    def turned(x: jax.Array, counts: jax.Array, *rest: Any) -> jax.Array:
        devices = counts.shape[0]
        back = [(n, (n + 1) % devices) for n in range(devices)]
        return jax.lax.ppermute(exchange(x, counts, *rest), rest[-1], back)

    _exchange_by(monkeypatch, turned)


def a_device_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device of a ring of experts takes itself for the next one."""
    real = jax.lax.axis_index

    def shifted(axes: Any) -> jax.Array:
        return (real(axes) + 1) % jax.lax.psum(1, axes)

    lax = SimpleNamespace(**{**vars(jax.lax), "axis_index": shifted})
    monkeypatch.setattr(dispatch, "jax", SimpleNamespace(**{**vars(jax), "lax": lax}))


def latest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of a row have room, not the first."""
    drop = experts.drop_tokens

    def backwards(experts_BTk: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        return drop(experts_BTk[:, ::-1], *rest, **more)[:, ::-1]

    monkeypatch.setattr(experts, "drop_tokens", backwards)


@pytest.mark.exhaustive
def test_a_fault_in_what_is_dropped(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    """Also documents of a row are told apart, which share its room."""
    model = {**EXPERTS, "num_layers": 1, "mlp_pattern": ["experts"]}
    model["experts"] = {**EXPERTS["experts"], "capacity_factor": 0.75}
    changes = {**FLOAT32, "mesh": {"fsdp": 1, "expert": 2, "context": 2}, "remat": "none"}
    assert not failed(run_checks("mesh", "packing", model=model, **changes))
    latest_first(monkeypatch)
    assert failed(run_checks("mesh", model=model, **changes))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plant", "exchange"),
    [
        (lost_in_the_exchange, "all_to_all"),
        pytest.param(doubled_in_the_exchange, "all_to_all", marks=pytest.mark.exhaustive),
        pytest.param(next_devices_experts, "all_to_all", marks=pytest.mark.exhaustive),
        pytest.param(a_device_out_of_turn, "all_gather", marks=pytest.mark.exhaustive),
        pytest.param(half_router, "all_gather", marks=pytest.mark.exhaustive),
        pytest.param(leaking_bias, "all_to_all", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_in_experts_on_several_devices(
    plant: Callable[[pytest.MonkeyPatch], None],
    exchange: str,
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each device has half of the experts, which other devices' tokens reach."""
    model = {**EXPERTS, "num_layers": 1, "mlp_pattern": ["experts"]}
    model["experts"] = {**EXPERTS["experts"], "exchange": exchange}
    changes = {**FLOAT32, "mesh": {"fsdp": 1, "expert": 2}, "accumulate": 1, "remat": "none"}
    assert not failed(run_checks("mesh", model=model, **changes))
    plant(monkeypatch)
    found = failed(run_checks("mesh", model=model, **changes))
    assert set(found) & {"expert=2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        half_router,
        pytest.param(leaking_bias, marks=pytest.mark.exhaustive),
        pytest.param(other_order, marks=pytest.mark.exhaustive),
        lost_row,
        pytest.param(doubled_row, marks=pytest.mark.exhaustive),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_fault_in_experts(
    plant: Callable[[pytest.MonkeyPatch], None],
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
):
    plant(monkeypatch)
    model = {**EXPERTS, "num_layers": 1, "mlp_pattern": ["experts"]}
    changes = {**DATA, **FLOAT32, "accumulate": 1, "remat": "none"}
    assert failed(run_checks("mesh", model=model, **changes))


def unturned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that all heads share is not rotated, the queries are."""
    rotate = latent.rotary_embedding

    def queries_alone(x_BTNP: jax.Array, *rotation: Any) -> jax.Array:
        return x_BTNP if x_BTNP.shape[2] == 1 else rotate(x_BTNP, *rotation)

    monkeypatch.setattr(latent, "rotary_embedding", queries_alone)


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's value comes before its key in the up-projection; both are as wide here."""
    split = jnp.split

    def other_way(x: jax.Array, at: Any, axis: int = 0) -> Any:
        parts = split(x, at, axis=axis)
        by_head = x.ndim == 4 and parts[0].shape == parts[1].shape
        return parts[::-1] if by_head else parts

    monkeypatch.setattr(latent, "jnp", SimpleNamespace(**{**vars(jnp), "split": other_way}))


def unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """YaRN does not multiply the scores."""
    options = latent.LatentAttention._options

    def plain(self: Any, kind: Any) -> Any:
        width = self.config.unrotated_dim + self.config.rotated_dim
        return dataclasses.replace(options(self, kind), scale=width**-0.5)

    monkeypatch.setattr(latent.LatentAttention, "_options", plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        unturned,
        pytest.param(swapped, marks=pytest.mark.exhaustive),
        pytest.param(unscaled, marks=pytest.mark.exhaustive),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_fault_in_latent_attention(
    plant: Callable[[pytest.MonkeyPatch], None],
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
):
    changes = {**DATA, **FLOAT32, "accumulate": 1, "remat": "none"}
    model = {**LATENT, "num_layers": 1}
    plant(monkeypatch)
    assert failed(run_checks("mesh", model=model, **changes))


@pytest.mark.exhaustive
def test_latent_attention_and_experts_without_a_fault_pass(run_checks: RunChecks):
    """On divided experts and heads, with recomputation, and after a step that moves their bias."""
    model = {**LATENT, "num_layers": 2, "mlp_pattern": ["mlp", "experts"]}
    model["experts"] = EXPERTS["experts"]
    changes = {"mesh": {"expert": 2, "tensor": 2, "fsdp": 1}, "accumulate": 1, **FLOAT32}
    assert not failed(run_checks("mesh", "checkpoint", model=model, **changes))


def by_another_rule(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Linear layers whose rule gets what `change` makes of its operands and starts."""
    rule = kernels.gated_delta_rule

    def changed(*operands: Any, starts_BT: Any, **options: Any) -> Any:
        operands, starts_BT = change(operands, starts_BT)
        return rule(*operands, starts_BT=starts_BT, **options)

    monkeypatch.setattr(kernels, "gated_delta_rule", changed)


def kept_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document finds the state of the one before it in its row."""
    by_another_rule(monkeypatch, lambda operands, _: (operands, None))


def half_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms of decays rounded to bfloat16."""

    def rounded(operands: Any, starts: Any) -> Any:
        *first, decay, beta = operands
        return (*first, decay.astype(jnp.bfloat16).astype(jnp.float32), beta), starts

    by_another_rule(monkeypatch, rounded)


def ungated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's result passes its gate as it is."""
    monkeypatch.setattr(attention, "_gate", lambda o_BTNH, gate_BTNH: o_BTNH)


def other_layers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes the keys and values that were kept for layers with another window."""
    own = attend.PassKeys.attend

    def wrong(self: Any, q: Any, k: Any, *rest: Any) -> Any:
        kept = self.kept
        if k is None:
            kept = dict(zip(kept, reversed(kept.values()), strict=True))
        return own(attend.PassKeys(self.context, kept), q, k, *rest)

    monkeypatch.setattr(attend.PassKeys, "attend", wrong)


def raw_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are not normalised."""
    monkeypatch.setattr(attention, "_unweighted_norm", lambda x_BTNH, eps: x_BTNH)


def next_layers_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer gets the further input of the one before it."""
    own = LayerInputs.__call__
    monkeypatch.setattr(LayerInputs, "__call__", lambda *args: jnp.roll(own(*args), 1, axis=0))


def unscaled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's output is not multiplied by its number."""
    monkeypatch.setattr(LayerScale, "__call__", lambda self, x_BTD: x_BTD)


OF_ONE_SIZE = {name: value for name, value in GEMMA4.items() if name != "global_heads"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "model"),
    [
        pytest.param(kept_state, GATED_DELTA, marks=pytest.mark.exhaustive),
        pytest.param(kept_state, MAMBA2, marks=pytest.mark.exhaustive),
        pytest.param(half_decay, GATED_DELTA, marks=pytest.mark.exhaustive),
        pytest.param(half_decay, MAMBA2, marks=pytest.mark.exhaustive),
        pytest.param(ungated, GATED_DELTA, marks=pytest.mark.exhaustive),
        pytest.param(other_layers_keys, OF_ONE_SIZE, marks=pytest.mark.exhaustive),
        pytest.param(raw_values, GEMMA4, marks=pytest.mark.exhaustive),
        pytest.param(next_layers_input, GEMMA4, marks=pytest.mark.exhaustive),
        pytest.param(unscaled_layer, GEMMA4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_in_a_hybrid_or_between_layers(
    plant: Callable[[pytest.MonkeyPatch], None],
    model: dict[str, Any],
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
):
    plant(monkeypatch)
    changes = {**DATA, **FLOAT32, "accumulate": 1, "remat": "none"}
    assert "data=2" in failed(run_checks("mesh", model=model, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            {**GATED_DELTA, "experts": EXPERTS["experts"]},
            id="gated delta",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(MAMBA2, id="mamba", marks=pytest.mark.exhaustive),
        pytest.param(GEMMA4, id="gemma 4", marks=pytest.mark.exhaustive),
        pytest.param(
            {
                **GEMMA3,
                "num_layers": 2,
                "attention_pattern": ["full"],
                "sliding_window": None,
                "local_rope": None,
                "experts": {
                    "num_experts": 8,
                    "experts_per_token": 2,
                    "intermediate_size": 512,
                    "shared_intermediate_size": 1024,
                    "separate_norms": True,
                },
            },
            id="separate norms",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_hybrids_and_layers_that_hand_on_without_a_fault_pass(
    model: dict[str, Any], run_checks: RunChecks
):
    """On divided heads and weights, with recomputation and packed rows, in float32."""
    changes = {"mesh": {"fsdp": 2, "tensor": 2}, "remat": "save_attention", **FLOAT32}
    assert not failed(run_checks("mesh", "packing", model=model, accumulate=1, **changes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [GATED_DELTA, MAMBA2, GEMMA4])
def test_hybrids_pass_in_bfloat16(model: dict[str, Any], run_checks: RunChecks):
    """All as configured, with recomputation and accumulation."""
    assert not failed(run_checks("precision", model=model, mesh={"fsdp": -1, "tensor": 2}))


def test_axes_that_layers_do_not_take_are_refused(run_checks: RunChecks):
    with pytest.raises(ConfigError, match=r"not supported yet \(context axis\)"):
        run_checks("mesh", model=GATED_DELTA, mesh={"fsdp": 1, "context": 2})
    with pytest.raises(ConfigError, match=r"not supported yet \(stage axis\)"):
        run_checks("mesh", model=GEMMA4, mesh={"fsdp": 1, "stage": 2})


def rolled(x: jax.Array) -> jax.Array:
    """The array with each device holding the part of the next one."""
    arrays = [shard.data for shard in x.addressable_shards]
    devices = [shard.device for shard in x.addressable_shards]
    moved = [
        jax.device_put(np.asarray(array), device)
        for array, device in zip(arrays[1:] + arrays[:1], devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, moved)


@pytest.mark.slow
def test_a_stale_checkpoint_sharding(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    """Devices restore the parts that they held under another mesh."""
    restore = Checkpointer.restore

    def stale(self: Checkpointer, *args: Any, **kwargs: Any) -> Any:
        found = restore(self, *args, **kwargs)
        table = found.state["params"]["embed"]
        table["embedding"] = rolled(table["embedding"])
        return found

    monkeypatch.setattr(Checkpointer, "restore", stale)
    found = failed(run_checks("checkpoint", **DATA, **FLOAT32))
    assert len(found) == 1
    assert "params/embed/embedding came back with other contents" in next(iter(found.values()))


@pytest.mark.slow
def test_a_checkpoint_left_in_its_old_layout(
    run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch
):
    restore = Checkpointer.restore

    def replicated(self: Checkpointer, *args: Any, **kwargs: Any) -> Any:
        found = restore(self, *args, **kwargs)
        table = found.state["params"]["embed"]
        where = jax.sharding.NamedSharding(table["embedding"].sharding.mesh, PartitionSpec())
        table["embedding"] = jax.device_put(table["embedding"], where)
        return found

    monkeypatch.setattr(Checkpointer, "restore", replicated)
    found = failed(run_checks("checkpoint", **DATA, **FLOAT32))
    assert "params/embed/embedding came back laid out as" in next(iter(found.values()))


@pytest.mark.slow
def test_a_remat_that_recomputes_something_else(
    run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch
):
    """As with a dropout key that is another the second time."""
    from fornax.models import scan

    def faulty(layer: Any, remat: Any, **_: bool) -> Any:
        if remat == "none" or getattr(remat, "policy", None) == "none":
            return layer

        def again(period: Any, x: jax.Array, *more: Any) -> Any:
            kept = jax.random.bernoulli(jax.random.key(1), 0.99, x.shape)
            return layer(period, jnp.where(kept, x, 0), *more)

        def run(period: Any, x: jax.Array, *more: Any) -> Any:
            (right, *others), (wrong, *_) = layer(period, x, *more), again(period, x, *more)
            return wrong + jax.lax.stop_gradient(right - wrong), *others

        return run

    monkeypatch.setattr(scan, "rematerialise", faulty)
    report = run_checks("remat", "mesh", **DATA, **FLOAT32)
    assert set(failed(report)) >= {"dots"}
    assert "data=2" not in failed(report)
    assert "gradient of" in failed(report)["dots"]


def test_rows_read_by_two_hosts(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    open_batches = pretrain.open_batches

    def first_only(*args: Any, process_index: int, **kwargs: Any) -> Any:
        return open_batches(*args, process_index=0, **kwargs)

    monkeypatch.setattr(pretrain, "open_batches", first_only)
    found = failed(run_checks("data", mesh={"fsdp": -1}))
    assert set(found) == {f"rows of {count} hosts" for count in (2, 3, 4, 5)}
    assert "host 1 should read row 8 of batch 0, not row 0" in found["rows of 2 hosts"]


@pytest.mark.exhaustive
def test_a_z_loss_of_twice_its_weight(run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch):
    def twice(*args: Any, z_loss: float, **kwargs: Any) -> Any:
        return linear_cross_entropy(*args, z_loss=2 * z_loss, **kwargs)

    monkeypatch.setattr(pretrain, "linear_cross_entropy", twice)
    report = run_checks("mesh", "z_loss", **DATA, **FLOAT32)
    assert "weight 0.0001" in failed(report)


@pytest.mark.slow
def test_products_rounded_more_than_their_dtype_says(
    run_checks: RunChecks, monkeypatch: pytest.MonkeyPatch
):
    """Activations of three bits of fraction, as of float8, where bfloat16 has seven."""
    linear = kernels.linear

    def rounded(x: jax.Array, w: Any, **options: Any) -> jax.Array:
        low = x.dtype == jnp.bfloat16
        return linear(jax.lax.reduce_precision(x, 8, 3) if low else x, w, **options)

    monkeypatch.setattr(kernels, "linear", rounded)
    report = run_checks("precision", **DATA)
    assert len(failed(report)) == 2


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"fsdp": 2, "rules": {"activation_kv_heads": ["fsdp"]}},
            "`mesh.rules.activation_kv_heads` matches no array",
        ),
        ({"fsdp": 1, "context": 2, "rules": {"length": []}}, "`mesh.context` divides nothing"),
        (
            {"fsdp": 1, "tensor": 2, "rules": {"head_dim": ["tensor"]}},
            "`mesh.rules.head_dim` names tensor, which divides it in no array",
        ),
    ],
)
def test_a_rule_that_does_nothing(run_checks: RunChecks, mesh: dict[str, Any], message: str):
    report = run_checks("rules", mesh=mesh)
    assert report.first_failure is not None
    assert message in report.first_failure.detail


def test_a_model_that_does_not_divide(run_checks: RunChecks):
    report = run_checks("rules", mesh={"fsdp": 1, "tensor": 3})
    assert report.first_failure is not None
    assert "does not divide over tensor=3" in report.first_failure.detail


STAGED = {"mesh": {"fsdp": 1, "stage": 2}, "accumulate": 1, "remat": "none", **FLOAT32}


def stale_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage takes the microbatch that it has just done again."""
    get = pipeline._get

    def late(slots: jax.Array, index: jax.Array) -> jax.Array:
        return get(slots, (index - 1) % len(slots))

    monkeypatch.setattr(pipeline, "_get", late)


def stale_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage keeps what it made, and the next one continues with its own."""
    advance = pipeline._Ring._advance

    def kept(self: Any, tick: jax.Array, slots: jax.Array, new: jax.Array) -> Any:
        slots, taken = advance(self, tick, slots, new)
        return slots, jnp.where(jax.lax.axis_index("stage") == 0, taken, new)

    monkeypatch.setattr(pipeline._Ring, "_advance", kept)


def neighbours_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to the rows of a microbatch stays where it is, and its rows continue."""
    advance = pipeline._Ring.advance

    def alone(self: Any, tick: jax.Array, waiting: Any, made: Any) -> Any:
        slots, taken = advance(self, tick, waiting, made)
        return [slots[0], *waiting[1:]], [taken[0], *made[1:]]

    monkeypatch.setattr(pipeline._Ring, "advance", alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plant",
    [
        stale_microbatch,
        pytest.param(stale_input, marks=pytest.mark.exhaustive),
        pytest.param(neighbours_positions, marks=pytest.mark.exhaustive),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_fault_in_a_pipeline(
    plant: Callable[[pytest.MonkeyPatch], None],
    run_checks: RunChecks,
    monkeypatch: pytest.MonkeyPatch,
):
    assert not failed(run_checks("mesh", **STAGED))
    plant(monkeypatch)
    assert "stage=2" in failed(run_checks("mesh", **STAGED))


@pytest.mark.exhaustive
def test_stages_across_slices_pass(run_checks: RunChecks):
    mesh = {"fsdp": 1, "slice": 2, "stage": 2, "across": "stage"}
    model = {**QWEN3, "num_layers": 4}
    report = run_checks("rules", "mesh", model=model, **{**STAGED, "mesh": mesh, "batch_size": 16})
    assert not failed(report)
    assert any("slice=2 x stage=2, stages across slices" in check.name for check in report.checks)
