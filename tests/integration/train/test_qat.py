"""A run of quantization-aware training on eight devices, quantized, is the model it trained."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config import ConfigError, from_mapping
from fornax.mesh import MeshConfig
from fornax.models import Decoder, load_pretrained
from fornax.models.layout import flat_variables
from fornax.quant import plan_qat, quantize
from fornax.train import (
    Hosts,
    Ledger,
    TrainConfig,
    convert,
    load_decoder,
    pretrain_task,
    read_metrics,
    train,
)
from fornax.train.hosts import to_global
from fornax.train.session import first_state, prepare
from fornax.train.step import sum_gradients

pytestmark = pytest.mark.slow

ONE = MeshConfig(fsdp=1, data=1)
RULES = ("lm_head=w8a16", "layers/1/mlp/down=keep")


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing of the report out: it takes longer than these runs."""
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)


@pytest.fixture(scope="module")
def config(settings: dict[str, Any]) -> TrainConfig:
    model = {**settings["model"], "hidden_size": 128, "intermediate_size": 128}
    quant = {"qat": "w4a16", "rules": RULES}
    optim = {"learning_rate": 1e-2, "schedule": {"type": "constant"}}
    changes = {"steps": 4, "save_every": 2, "eval": {"every": 4, "batches": 1}, "optim": optim}
    return from_mapping(TrainConfig, {**settings, "model": model, "quant": quant, **changes})


@pytest.fixture(scope="module")
def run(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qat") / "run"
    train(config, folder, progress="none")
    return folder


@pytest.fixture(scope="module")
def few_bits(run: Path) -> Path:
    """The run as a directory, quantized."""
    convert(run, run.parent / "float")
    out = run.parent / "few"
    quantize(run.parent / "float", out, scheme="w4a16", rules=RULES)
    return out


def bits(model: nnx.Module) -> dict[str, bytes]:
    return {path: np.asarray(x.get_value()).tobytes() for path, x in flat_variables(model).items()}


def test_the_quantized_run_is_the_model_that_was_trained(
    config: TrainConfig, run: Path, few_bits: Path
) -> None:
    trained, read = load_decoder(run), load_pretrained(few_bits)
    quantizer = plan_qat(trained, config.quant)
    assert quantizer is not None
    graphdef, params, rest = nnx.split(trained, nnx.Param, ...)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 320, (4, 32)))

    def logits(model: Decoder) -> jax.Array:
        return model.logits(model.hidden(tokens_BT))

    def seen(params: Any) -> jax.Array:
        return logits(nnx.merge(graphdef, quantizer.round(params), rest))

    pure = nnx.to_pure_dict(params)
    assert bits(nnx.merge(graphdef, jax.jit(quantizer.round)(pure), rest)) == bits(read)
    found, wanted = jax.jit(seen)(pure), nnx.jit(logits)(read)
    np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(nnx.jit(logits)(trained), wanted)


def test_the_run_was_evaluated_as_the_file_is(
    config: TrainConfig, run: Path, few_bits: Path
) -> None:
    """The loss that a run of the file's own weights, without any rounding, begins with."""
    again = dataclasses.replace(
        config,
        init_from=str(few_bits),
        model=None,
        quant=dataclasses.replace(config.quant, qat=None, rules=()),
        steps=1,
        optim=dataclasses.replace(config.optim, learning_rate=1e-30),
        eval=dataclasses.replace(config.eval, every=1),
    )
    train(again, run.parent / "again", progress="none")
    was, now = (read_metrics(x / "metrics.jsonl")[-1] for x in (run, run.parent / "again"))
    assert now["eval/loss"] == pytest.approx(was["eval/loss"], rel=1e-6)


def test_a_run_that_stopped_goes_on_to_the_same_bits(
    config: TrainConfig, run: Path, tmp_path: Path
) -> None:
    train(dataclasses.replace(config, steps=2), tmp_path, progress="none")
    train(config, tmp_path, accept_changes=("steps",), progress="none")
    assert bits(load_decoder(tmp_path)) == bits(load_decoder(run))
    other = dataclasses.replace(config, quant=dataclasses.replace(config.quant, qat="w3a16"))
    with pytest.raises(ConfigError, match=r"quant\.qat"):
        train(other, tmp_path, progress="none")


def measure(config: TrainConfig, devices: Any, rows: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """The weights that the loss sees, the loss and the gradients."""
    programs = prepare(config, pretrain_task(config), Ledger(), devices)
    state, parts = first_state(config, programs), programs.parts

    def compute(params: Any, batch: Any) -> Any:
        seen = parts.forward_params(params)
        loss, _, grads = sum_gradients(parts, seen, {}, batch, jax.random.key(0))
        return seen, loss.total, grads

    batch = to_global(rows, programs.shapes_of(rows))
    return jax.device_get(jax.jit(compute)(state.params, batch))


@pytest.mark.parametrize("scheme", ["w4a16", pytest.param("w8a8", marks=pytest.mark.exhaustive)])
def test_eight_devices_round_as_one(config: TrainConfig, scheme: str) -> None:
    """Each of 64 inputs of a group lies on another device than some others."""
    quant = dataclasses.replace(config.quant, qat=scheme, rules=())
    whole = dataclasses.replace(config, quant=quant, mesh=MeshConfig(fsdp=4, tensor=2))
    batches = pretrain_task(whole).batches("train", Hosts())
    rows = next(batches)
    batches.close()
    single = measure(dataclasses.replace(whole, mesh=ONE), jax.devices()[:1], rows)
    found = measure(whole, jax.devices(), rows)
    for got, want in zip(jax.tree.leaves(found[0]), jax.tree.leaves(single[0]), strict=True):
        np.testing.assert_array_equal(got, want)
    assert found[1] == pytest.approx(single[1], rel=1e-5)
    for got, want in zip(jax.tree.leaves(found[2]), jax.tree.leaves(single[2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


def test_gradients_are_those_at_the_rounded_weights(config: TrainConfig) -> None:
    """Finite differences of the loss around what the file would hold."""
    config = dataclasses.replace(config, mesh=ONE)
    batches = pretrain_task(config).batches("train", Hosts())
    rows = next(batches)
    batches.close()
    programs = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:1])
    state, parts = first_state(config, programs), programs.parts
    batch = to_global(rows, programs.shapes_of(rows))
    seen = jax.jit(parts.forward_params)(state.params)
    run = jax.jit(lambda params: sum_gradients(parts, params, {}, batch, jax.random.key(0)))
    _, _, grads = run(seen)
    size = float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))))
    step = 2e-3
    ends = [
        float(run(jax.tree.map(lambda w, g, s=s: w + s * g / size, seen, grads))[0].total)
        for s in (step, -step)
    ]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(size, rel=1e-2)
