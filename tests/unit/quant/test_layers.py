"""Layers one after the other: what is collected of the text, and what comes of it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    LayerByLayer,
    create_decoder,
    load_pretrained,
    open_pretrained,
    save_pretrained,
)
from fornax.quant import quantize
from fornax.quant.layers import FEWEST_ROWS
from fornax.quant.statistics import layer_statistics

TOKENS = np.random.default_rng(0).integers(0, 384, (3, 32), dtype=np.int32)


def normed(model: Path) -> np.ndarray:
    """What the first layer's projections take in, float64 [R, D]."""
    decoder = load_pretrained(model)
    x = np.asarray(decoder.embed.embedding[...], np.float64)[TOKENS].reshape(-1, 128)
    scale = np.asarray(decoder.layers.attention_norm.scale[...][0], np.float64)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + decoder.config.norm_eps) * scale


def test_sums_are_those_of_the_rows_that_a_weight_meets(model: Path) -> None:
    layers = LayerByLayer(open_pretrained(model))
    before = [layers.embed(jnp.asarray(row[None])) for row in TOKENS]
    found = layer_statistics(
        layers, 0, before, {"attention/q/kernel": True, "attention/o/kernel": True}
    )
    x = normed(model)
    own = found["attention/q/kernel", None]
    assert own.rows == TOKENS.size
    np.testing.assert_allclose(own.h_KK, x.T @ x, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(own.most_K, np.abs(x).max(axis=0), rtol=1e-5)
    assert found["attention/o/kernel", None].h_KK.shape == (128, 128)


def test_each_expert_has_the_rows_of_its_tokens(tmp_path: Path) -> None:
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=64)
    config = DecoderConfig(
        vocab_size=384, hidden_size=128, num_layers=1, num_heads=2, experts=experts
    )
    save_pretrained(create_decoder(config), tmp_path / "m")
    layers = LayerByLayer(open_pretrained(tmp_path / "m"))
    before = [layers.embed(jnp.asarray(TOKENS))]
    names = [f"experts/{part}/kernel" for part in ("router", "gate", "up", "down")]
    found = layer_statistics(layers, 0, before, dict.fromkeys(names, True))
    router, own = found[names[0], None], [found[names[1], expert] for expert in range(4)]
    assert sum(each.rows for each in own) == 2 * TOKENS.size
    # Each token is in two experts' sums.
    np.testing.assert_allclose(
        sum(each.h_KK for each in own), 2 * router.h_KK, rtol=1e-4, atol=1e-3
    )
    assert found[names[3], 0].h_KK.shape == (64, 64)


@pytest.mark.slow
def test_gptq_is_closer_than_rounding(model: Path, texts: Path, tmp_path: Path) -> None:
    options = {"data": str(texts), "length": 64, "samples": 64}
    reports = {
        name: quantize(model, tmp_path / name, scheme=name, **options)
        for name in ("w4a16", "w4a16-gptq")
    }
    kl = {name: report.held_out.kl for name, report in reports.items()}
    assert kl["w4a16-gptq"] < 0.8 * kl["w4a16"]
    notes = reports["w4a16-gptq"].quantized.values()
    assert {(note["method"], note["rows"]) for note in notes} == {("gptq", 64 * 64)}


@pytest.mark.slow
def test_awq_is_closer_than_rounding_where_some_inputs_are_large(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    decoder = load_pretrained(model)
    for norm in (decoder.layers.attention_norm, decoder.layers.mlp_norm):
        norm.scale.set_value(norm.scale.get_value().at[:, 5:100:31].multiply(12.0))
    save_pretrained(decoder, tmp_path / "m", model)
    options = {"data": str(texts), "length": 64, "samples": 16}
    reports = {
        name: quantize(tmp_path / "m", tmp_path / name, scheme=name, **options)
        for name in ("w4a16", "w4a16-awq")
    }
    kl = {name: report.held_out.kl for name, report in reports.items()}
    assert kl["w4a16-awq"] < 0.8 * kl["w4a16"]
    notes = reports["w4a16-awq"].quantized
    assert notes["model.layers.0.mlp.down_proj.weight"]["scaled"]
    out = notes["model.layers.0.self_attn.o_proj.weight"]
    assert out["unscaled"] == "query heads share a value head"
    assert out["error"] < 0.02


@pytest.mark.slow
def test_smoothquant_is_closer_where_some_inputs_are_large(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    """As only a comparison shows whose inputs are rounded too."""
    decoder = load_pretrained(model)
    for norm in (decoder.layers.attention_norm, decoder.layers.mlp_norm):
        norm.scale.set_value(norm.scale.get_value().at[:, 5:100:31].multiply(30.0))
    save_pretrained(decoder, tmp_path / "m", model)
    options = {"data": str(texts), "length": 64, "samples": 16}
    reports = {
        name: quantize(tmp_path / "m", tmp_path / name, scheme=name, **options)
        for name in ("w8a16", "w8a8", "smoothquant")
    }
    kl = {name: report.held_out.kl for name, report in reports.items()}
    assert kl["smoothquant"] < 0.7 * kl["w8a8"]
    assert kl["w8a16"] < 0.5 * kl["w8a8"]
    out = reports["smoothquant"].quantized["model.layers.0.self_attn.o_proj.weight"]
    assert out["unscaled"] == "query heads share a value head"


@pytest.mark.parametrize("scheme", ["w4a16-gptq", "smoothquant", "nvfp4"])
def test_what_is_measured_on_text_needs_text(scheme: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{scheme} needs text"):
        quantize(model, tmp_path / "out", scheme=scheme)


@pytest.mark.slow
def test_experts_that_meet_few_tokens_are_rounded_and_listed(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    experts = ExpertsConfig(num_experts=8, experts_per_token=1, intermediate_size=128)
    config = DecoderConfig(
        vocab_size=384,
        hidden_size=128,
        num_layers=1,
        num_heads=2,
        experts=experts,
        max_position_embeddings=64,
    )
    save_pretrained(create_decoder(config), tmp_path / "m", model)
    options = {"data": str(texts), "length": 64, "samples": 12}
    report = quantize(tmp_path / "m", tmp_path / "out", scheme="w4a16-gptq", **options)
    gates = [note for name, note in report.quantized.items() if name.endswith("w1.weight")]
    assert len(gates) == 8
    few = [note for note in gates if note["method"] == "rounding"]
    assert 0 < len(few) < 8
    assert all("rows of the text, fewer than 128" in note["reason"] for note in few)
    assert all(note["rows"] >= FEWEST_ROWS for note in gates if note["method"] == "gptq")
    written = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert written["quantized"] == report.quantized
