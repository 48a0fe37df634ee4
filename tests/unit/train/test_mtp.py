"""Training with multi-token prediction: the loss by its formula, gradients, documents, meshes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.unit.train.test_routing import BASE, MODEL, _no_batches, rows

from fornax.config.errors import ConfigError
from fornax.mesh import MeshConfig, make_mesh, use_mesh
from fornax.models import Decoder, DecoderConfig, abstract_decoder, create_decoder
from fornax.models.routing import balanced_bias
from fornax.optim.tree import flatten
from fornax.train import TrainConfig, next_token_loss
from fornax.train.goodput import Ledger
from fornax.train.routing import settle_routing
from fornax.train.session import first_state, prepare
from fornax.train.task import Task

WEIGHT = 0.7
PLAIN = DecoderConfig(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_mtp_modules=2,
    num_heads=2,
    num_kv_heads=1,
    initializer_range=0.4,
)
IDS = np.array([[1] * 5 + [2] * 4 + [3] * 1 + [0] * 2, [1] * 2 + [2] * 3 + [3] * 7], np.int32)


def _batch() -> dict[str, np.ndarray]:
    """Documents of 1 to 7 tokens, whose last tokens have no target, and one token left out."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, PLAIN.vocab_size, IDS.shape, dtype=np.int32)
    positions, weights = np.zeros_like(IDS), np.zeros(IDS.shape, np.float32)
    for row, column in np.ndindex(IDS.shape):
        same = column > 0 and IDS[row, column] == IDS[row, column - 1]
        positions[row, column] = positions[row, column - 1] + 1 if same else 0
        if same:
            weights[row, column - 1] = IDS[row, column] > 0
    weights[1, 7] = 0
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segment_ids": IDS,
        "positions": positions,
        "loss_weights": weights,
    }


class _Oracle:
    """The model and its loss, token by token in float64, from the report's equations."""

    def __init__(self, params: Mapping[str, np.ndarray]) -> None:
        self.p = params

    def norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + PLAIN.norm_eps) * scale

    def rotate(self, x_H: np.ndarray, position: int) -> np.ndarray:
        half = len(x_H) // 2
        angle = position * 10_000.0 ** (-np.arange(half) / half)
        a, b = x_H[:half], x_H[half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    def layer(self, start: str, at: int, x_TD: np.ndarray) -> np.ndarray:
        """A layer over the tokens of one document."""

        def w(name: str) -> np.ndarray:
            return self.p[f"{start}/{name}"][at]

        normed = [self.norm(x, w("attention_norm/scale")) for x in x_TD]
        keys = [self.rotate(x @ w("attention/k/kernel")[:, 0], i) for i, x in enumerate(normed)]
        values = [x @ w("attention/v/kernel")[:, 0] for x in normed]
        out = []
        for i, x in enumerate(normed):
            y = x_TD[i]
            for n in range(PLAIN.num_heads):
                q = self.rotate(x @ w("attention/q/kernel")[:, n], i)
                scores = np.array([q @ k for k in keys[: i + 1]]) / np.sqrt(len(q))
                share = np.exp(scores - scores.max())
                mixed = sum(s * v for s, v in zip(share / share.sum(), values, strict=False))
                y = y + mixed @ w("attention/o/kernel")[n]
            h = self.norm(y, w("mlp_norm/scale"))
            gate = h @ w("mlp/gate/kernel")
            inner = gate / (1 + np.exp(-gate)) * (h @ w("mlp/up/kernel"))
            out.append(y + inner @ w("mlp/down/kernel"))
        return np.array(out)

    def cross_entropy(self, x: np.ndarray, target: int) -> float:
        logits = x @ self.p["lm_head/kernel"]
        return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])

    def sums(self, batch: Mapping[str, np.ndarray]) -> tuple[float, float, float, int]:
        """Sums of the next token's loss and its weight, of the modules' losses and theirs."""
        loss, count, further, number = 0.0, 0.0, 0.0, 0
        for row, document in [(r, d) for r in range(2) for d in np.unique(IDS[r]) if d]:
            places = np.flatnonzero(IDS[row] == document)
            tokens, weights = batch["tokens"][row, places], batch["loss_weights"][row, places]
            weights = weights.astype(np.float64)
            x_TD = self.p["embed/embedding"][tokens]
            for at in range(PLAIN.num_layers):
                x_TD = self.layer("layers", at, x_TD)
            h_TD = np.array([self.norm(x, self.p["final_norm/scale"]) for x in x_TD])
            for i in range(len(tokens) - 1):
                loss += weights[i] * self.cross_entropy(h_TD[i], tokens[i + 1])
                count += weights[i]
            for k in range(1, PLAIN.num_mtp_modules + 1):
                known = range(len(tokens) - k)  # whose k-th token after them is in the document
                inputs = []
                for i in known:
                    own = self.p["embed/embedding"][tokens[i + k]]
                    parts = [
                        self.norm(own, self.p["mtp/embed_norm/scale"][k - 1]),
                        self.norm(h_TD[i], self.p["mtp/hidden_norm/scale"][k - 1]),
                    ]
                    kernel = self.p["mtp/projection/kernel"][k - 1]
                    inputs.append(np.concatenate(parts) @ kernel)
                if not inputs:
                    break
                x_TD = self.layer("mtp/layer", k - 1, np.array(inputs))
                h_TD = np.array([self.norm(x, self.p["mtp/norm/scale"][k - 1]) for x in x_TD])
                for i in range(len(tokens) - k - 1):
                    further += weights[i + k] * self.cross_entropy(h_TD[i], tokens[i + k + 1])
                    number += weights[i + k]
        return loss, count, further, number

    def loss(self, batch: Mapping[str, np.ndarray]) -> float:
        loss, count, further, _ = self.sums(batch)
        return (loss + WEIGHT / PLAIN.num_mtp_modules * further) / count


def _drawn() -> Decoder:
    """The model with every norm's scale drawn too."""
    model = create_decoder(PLAIN, seed=2)
    rng = np.random.default_rng(5)
    moved = jax.tree.map(
        lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), nnx.state(model)
    )
    nnx.update(model, moved)
    return model


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_reports_equations() -> None:
    """Directional derivatives of every parameter, by central differences in float64."""
    graphdef, state = nnx.split(_drawn())
    batch = _batch()

    @jax.jit
    def run(state: nnx.State) -> Any:
        def loss(state: nnx.State) -> Any:
            found = next_token_loss(nnx.merge(graphdef, state), batch, mtp_weight=WEIGHT)
            return found.total / found.weight, found.metrics

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, metrics), gradients = run(state)
    params = {
        path: np.asarray(x, np.float64) for path, x in flatten(nnx.to_pure_dict(state)).items()
    }
    oracle = _Oracle(params)
    assert float(loss) == pytest.approx(oracle.loss(batch), rel=2e-6)
    first, count, further, number = oracle.sums(batch)
    assert number < 2 * count
    means = {name: float(x / weight) for name, (x, weight) in metrics.items()}
    assert means["mtp_loss"] == pytest.approx(further / number, rel=2e-6)
    assert means["cross_entropy"] == pytest.approx(first / count, rel=2e-6)
    grads = flatten(nnx.to_pure_dict(gradients))
    assert grads.keys() == params.keys()
    rng = np.random.default_rng(3)
    for path, value in params.items():
        way = rng.normal(size=value.shape)
        way /= np.linalg.norm(way)
        ends = [_Oracle({**params, path: value + e * way}).loss(batch) for e in (1e-5, -1e-5)]
        expected = (ends[0] - ends[1]) / 2e-5
        found = float(np.sum(np.asarray(grads[path], np.float64) * way))
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-6), path


def test_evaluation_measures_modules_and_is_the_next_tokens_loss() -> None:
    model, batch = _drawn(), _batch()
    run = nnx.jit(next_token_loss, static_argnames="mtp_weight")
    plain, measured = run(model, batch), run(model, batch, mtp_weight=0.0)
    np.testing.assert_array_equal(measured.total, plain.total)
    assert set(measured.metrics) - set(plain.metrics) == {"mtp_loss", "mtp_accuracy"}


DENSE = dataclasses.replace(
    PLAIN, vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2
)
EXPERTS = dataclasses.replace(MODEL, num_layers=2, num_mtp_modules=1)


@functools.cache
def _step(
    model: DecoderConfig, accumulate: int = 1, sizes: tuple[tuple[str, int], ...] = ()
) -> Any:
    """The state after a step, and its metrics, on the host."""
    task = Task(
        build=lambda rngs: Decoder(model, rngs=rngs),
        loss=lambda decoder, batch, key: next_token_loss(decoder, batch, mtp_weight=WEIGHT),
        settle=settle_routing,
        batches=_no_batches,
    )
    mesh = MeshConfig(**{"fsdp": 1, **dict(sizes)})
    config = dataclasses.replace(BASE, accumulate=accumulate, mesh=mesh)
    devices = jax.devices() if sizes else jax.devices()[:1]
    programs = prepare(config, task, Ledger(), devices)
    state, metrics = programs.step(first_state(config, programs), rows())
    return jax.device_get((state.params, state.other, metrics))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param(DENSE, {"fsdp": 2, "context": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param(EXPERTS, {"expert": 4, "data": 2}, marks=pytest.mark.exhaustive),
        pytest.param(EXPERTS, {"context": 4, "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param(DENSE, {"fsdp": 8}, marks=pytest.mark.exhaustive),
    ],
    ids=["axes", "experts", "experts in context", "fsdp"],
)
def test_a_step_is_that_of_one_device(model: DecoderConfig, sizes: dict[str, int]) -> None:
    """Where context divides rows, their tokens lie in balanced order."""
    params, other, metrics = _step(model)
    on_mesh, other_on_mesh, found = _step(model, sizes=tuple(sizes.items()))
    assert {"mtp_loss", "mtp_accuracy", "cross_entropy"} < metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), on_mesh, params)
    jax.tree.map(np.testing.assert_array_equal, other_on_mesh, other)


@pytest.mark.exhaustive
def test_biases_for_the_choice_of_modules_experts_move_by_their_own_load() -> None:
    """The loads of layers with experts come first, then those of modules."""
    _, other, metrics = _step(EXPERTS)
    load = metrics["expert_tokens"]
    assert load.shape == (1 + 1, 8)
    biases = [
        other["layers"]["experts"]["selection_bias"],
        other["mtp"]["layer"]["experts"]["selection_bias"],
    ]
    expected = balanced_bias(np.zeros((2, 8), np.float32), load, 0.25)
    np.testing.assert_array_equal(np.concatenate(biases), expected)
    assert np.any(biases[1] != 0)


@pytest.mark.exhaustive
def test_micro_batches_have_the_gradients_of_the_whole() -> None:
    one, four = ((x[0], x[2]["mtp_loss"]) for x in (_step(DENSE), _step(DENSE, accumulate=4)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), one, four)


def test_stages_are_refused() -> None:
    mesh = make_mesh(MeshConfig(stage=2, fsdp=4))
    with use_mesh(mesh), pytest.raises(ConfigError, match=r"further tokens.*stage axis\); give"):
        abstract_decoder(PLAIN).hidden(_batch()["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": PLAIN}, "mtp_weight=null and model.num_mtp_modules=2 do not go together"),
        ({"mtp_weight": 0.3}, "mtp_weight=0.3 and model.num_mtp_modules=0 do not go together"),
        ({"model": PLAIN, "mtp_weight": -1.0}, "mtp_weight=-1.0 must be above 0, or null"),
    ],
)
def test_modules_and_the_weight_of_their_loss_go_together(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_mtp_modules": -1}, "num_mtp_modules=-1 must be 0 or more"),
        ({"shared_kv_layers": 1}, "shared_kv_layers=1 do not go together"),
    ],
)
def test_models_that_modules_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PLAIN, **changes)
