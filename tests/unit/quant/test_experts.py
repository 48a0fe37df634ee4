"""Experts: those with a tensor each, and tensors that hold all of a layer's."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fornax.checkpoint.safetensors_file import DTYPES, find_tensors
from fornax.config.errors import ConfigError
from fornax.models import (
    config_from_hf,
    create_decoder,
    load_pretrained,
    read_config,
    save_pretrained,
)
from fornax.quant import quantize
from fornax.quant.rounding import dequantize, round_matrix, spread
from fornax.quant.schemes import scheme_named

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "tie_word_embeddings": False,
}
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A directory whose gates and ups take turns in one tensor of all experts."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    decoder = create_decoder(
        config_from_hf({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **SIZES}),
        seed=2,
    )
    for part in (decoder.layers.experts.gate, decoder.layers.experts.down):
        part.bias.set_value(part.bias.get_value() + 0.1)
    save_pretrained(decoder, folder / "float", model)
    return folder / "float"


def rounded(w_OI: np.ndarray, scheme: str) -> np.ndarray:
    own = scheme_named(scheme)
    codes = round_matrix(np.ascontiguousarray(w_OI), own, w_OI.dtype)
    return dequantize(codes.values_OI, *spread(codes.grid, own, w_OI.shape))


def test_experts_of_gpt_oss_become_its_own_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    report = quantize(gpt_oss, tmp_path / "out", scheme="mxfp4")
    config = read_config(tmp_path / "out")["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert "model.layers.0.self_attn.q_proj" in config["modules_to_not_convert"]
    tensors = find_tensors(tmp_path / "out", DTYPES)
    assert tensors[f"{GATE_UP}_blocks"].shape == (8, 256, 4, 16)
    assert tensors[f"{GATE_UP}_scales"].shape == (8, 256, 4)
    assert (
        "which gpt-oss's files alone have" in report.kept["model.layers.0.self_attn.q_proj.weight"]
    )
    w = find_tensors(gpt_oss)[GATE_UP].view()
    layers = load_pretrained(tmp_path / "out").layers.experts
    for part, start in ((layers.gate, 0), (layers.up, 1)):
        found = np.asarray(part.kernel[...][1, 3]).T
        np.testing.assert_array_equal(found, rounded(w[3, :, start::2].T, "mxfp4"))
    assert 0 < report.quantized[GATE_UP]["error"] < 0.03


def test_other_schemes_beside_gpt_oss_mxfp4_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no other scheme beside the MXFP4 of experts"):
        quantize(gpt_oss, tmp_path / "out", scheme="mxfp4", rules=["attention=fp8"])


@pytest.mark.parametrize("scheme", ["w4a16", "fp8", "nvfp4a16"])
def test_a_tensor_of_all_experts_becomes_a_matrix_of_each(
    scheme: str, gpt_oss: Path, tmp_path: Path
) -> None:
    report = quantize(gpt_oss, tmp_path / "out", scheme=scheme, rules=["layers/0/.*down=keep"])
    w = find_tensors(gpt_oss)[DOWN].view()
    experts = load_pretrained(tmp_path / "out").layers.experts
    found = np.asarray(experts.down.kernel[...][1, 5]).T
    wanted = rounded(w[5].T, scheme)
    if scheme == "nvfp4a16":
        wanted = wanted.astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, wanted)
    kept = find_tensors(gpt_oss)["model.layers.0.mlp.experts.down_proj"].view()
    np.testing.assert_array_equal(experts.down.kernel[...][0], kept)
    np.testing.assert_array_equal(experts.down.bias[...][1, 5], np.full(128, 0.1, np.float32))
    assert 0 < report.quantized[GATE_UP]["error"] < 0.03
    packed = "weight" if scheme == "fp8" else "weight_packed"
    assert f"model.layers.1.mlp.experts.7.gate_proj.{packed}" in find_tensors(
        tmp_path / "out", DTYPES
    )


@pytest.mark.slow
def test_calibrated_schemes_count_the_tokens_of_each_expert(
    gpt_oss: Path, texts: Path, tmp_path: Path
) -> None:
    options = {"data": str(texts), "length": 64, "samples": 12}
    report = quantize(gpt_oss, tmp_path / "out", scheme="w4a16-gptq", **options)
    note = report.quantized[DOWN]
    assert "of 8 matrices, the first: it received" in note["reason"]
    assert note["method"] == "gptq"
    assert 128 <= note["rows"] < 2 * 12 * 64
    assert report.held_out is not None
    assert 0 < report.held_out.kl < 1


@pytest.mark.slow
def test_scales_of_inputs_are_those_of_the_text(gpt_oss: Path, texts: Path, tmp_path: Path) -> None:
    """Engines run queries, keys and values as one product, whose divisor is one; an expert that
    few tokens reach has the divisor of all."""
    options = {"data": str(texts), "length": 64, "samples": 6}
    report = quantize(gpt_oss, tmp_path / "out", scheme="nvfp4", **options)
    tensors = find_tensors(tmp_path / "out", DTYPES)
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    float_model = find_tensors(gpt_oss)
    most = max(np.abs(float_model[f"{part}.weight"].view()).max() for part in parts)
    for ending in ("weight_global_scale", "input_global_scale"):
        (one,) = {float(tensors[f"{part}.{ending}"].view()[0]) for part in parts}
        assert one > 0
        if ending == "weight_global_scale":
            assert one == pytest.approx(448 * 6 / most)
    divisors = report.quantized[DOWN]["input_divisors"]
    assert len(divisors) == 8
    assert len(set(divisors)) > 1
    third = tensors["model.layers.1.mlp.experts.3.down_proj.input_global_scale"]
    assert divisors[3] == third.view()[0]
    assert "the scale of inputs is of all experts" in report.quantized[DOWN]["reason"]
    assert report.held_out is not None
    assert 0 < report.held_out.kl < 1
