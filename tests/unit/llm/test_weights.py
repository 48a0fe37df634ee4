"""Weights of quantized directories: packed with the files' own codes, or dequantized and why."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.cases import one_in
from tests.gguf_blocks import gguf_file, random_blocks
from tests.memory import let_programs_go
from tests.unit.models.quantized_models import quantize_folder

from fornax.config.errors import CheckpointError, EngineError
from fornax.kernels import PackedWeight
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.weights import Weights, describe_weights, load_weights
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    config_from_hf,
    create_decoder,
    load_pretrained,
    read_config,
    save_pretrained,
    stored_code_formats,
)

CPU = DeviceSpec(platform="cpu", num_devices=1, memory=None)
EXACT = {"gptq": np.float16, "awq": np.float16, "pack": np.float32, "fp8": jnp.bfloat16}
"""What a scheme's library rounds products to."""
EXACT["gptq-order"] = np.float16
FEW = {
    "gptq": "int4",
    "gptq-order": "int4",
    "awq": "int4",
    "pack": "int4",
    "fp8": "fp8",
    "mxfp4": "mxfp4",
}
FEW_EXPERTS = {"gpt-oss": "mxfp4", "fp8-blocks": "fp8", "gptq": "int4", "awq": "int4"}
FEW_EXPERTS["pack"] = "int4"


@pytest.fixture(autouse=True)
def small_process() -> Iterator[None]:
    """Many cases compile their own programs."""
    yield
    let_programs_go(1600)


def floats(folder: Path, family: str, std: float = 0.5, **more: Any) -> Path:
    config = DecoderConfig(
        **more,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        family=family,
        tie_embeddings=False,
        initializer_range=std,
    )
    save_pretrained(create_decoder(config, seed=1), folder)
    return folder


def with_experts(folder: Path, scheme: str, std: float = 0.5) -> Path:
    """Experts with a tensor each, or by gpt-oss in one tensor with biases; quantized."""
    experts = ExpertsConfig(num_experts=3, experts_per_token=2, intermediate_size=96)
    if scheme != "gpt-oss":
        source = floats(folder / "floats", "qwen3_moe", std, experts=experts, qk_norm="head")
        return quantize_folder(source, folder / scheme, scheme)
    config = config_from_hf(
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 64,
            "max_position_embeddings": 128,
            "hidden_act": "silu",
            "initializer_range": std,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
        }
    )
    save_pretrained(create_decoder(config, seed=1), folder / "floats")
    picked = ("gate_up_proj", "down_proj")
    return quantize_folder(
        folder / "floats", folder / scheme, scheme, lambda name: name.endswith(picked)
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return floats(tmp_path_factory.mktemp("llama") / "floats", "llama")


def kernels_of(weights: Weights) -> dict[str, object]:
    flat = nnx.to_flat_state(weights.state)
    return {"/".join(path): x.get_value() for path, x in flat if path[-1] == "kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", FEW)
def test_a_files_own_codes_are_served(scheme: str, llama: Path, tmp_path: Path) -> None:
    """They stand for what the file does, which its library may round further."""
    folder = quantize_folder(llama, tmp_path / scheme, scheme)
    weights = load_weights(folder, EngineConfig(dtype="float32"))
    wanted = {
        "/".join(path): np.asarray(x.get_value())
        for path, x in nnx.to_flat_state(nnx.state(load_pretrained(folder, "float32")))
    }
    for name, packed in kernels_of(weights).items():
        assert isinstance(packed, PackedWeight)
        found = np.asarray(packed.unpack())
        if name == "lm_head/kernel":
            assert packed.precision == "float32"
        else:
            assert packed.precision == FEW[scheme]
            found = found.astype(EXACT.get(scheme, np.float32)).astype(np.float32)
        np.testing.assert_array_equal(found, wanted[name])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", FEW_EXPERTS)
def test_experts_are_served_with_their_files_codes(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_experts(tmp_path, scheme)
    with caplog.at_level(logging.INFO, "fornax.llm"):
        weights = load_weights(folder, EngineConfig(dtype="float32"))
    (line,) = [text for text in caplog.messages if "quantized weights" in text]
    assert "dequantized" not in line
    wide, held = load_pretrained(folder, "float32"), kernels_of(weights)
    for part in ("gate", "up", "down"):
        packed = held[f"layers/experts/{part}/kernel"]
        assert isinstance(packed, PackedWeight)
        assert (packed.precision, packed.group) == (FEW_EXPERTS[scheme], 32)
        assert packed.shape == (2, 3, *((64, 96) if part != "down" else (96, 64)))
        found = np.asarray(packed.unpack()).astype(EXACT.get(scheme, np.float32))
        wanted = getattr(wide.layers.experts, part).kernel[...]
        np.testing.assert_array_equal(found.astype(np.float32), wanted)
    model, formats = config_from_hf(read_config(folder)), stored_code_formats(folder)
    config = EngineConfig(dtype="float32")
    described = describe_weights(model, config, jnp.dtype(jnp.float32), CPU, formats)
    assert described.nbytes == weights.nbytes
    assert jax.tree.structure(described.state) == jax.tree.structure(weights.state)


@pytest.mark.slow
def test_an_order_of_inputs_stays_when_weights_change(llama: Path, tmp_path: Path) -> None:
    folder = quantize_folder(llama, tmp_path / "gptq", "gptq-order")
    config = EngineConfig(dtype="float32")
    weights, model = load_weights(folder, config), load_pretrained(llama)
    model_config, formats = config_from_hf(read_config(folder)), stored_code_formats(folder)
    described = describe_weights(model_config, config, jnp.dtype(jnp.float32), CPU, formats)
    adopted = weights.adopt(model)
    for other in (described, adopted):
        assert jax.tree.structure(other.state) == jax.tree.structure(weights.state)
    packed = kernels_of(adopted)["layers/mlp/up/kernel"]
    assert packed.order is not None
    wanted = model.layers.mlp.up.kernel[...]
    np.testing.assert_allclose(packed.unpack(), wanted, atol=float(jnp.abs(wanted).max()) / 15)


@pytest.mark.slow
def test_parts_of_a_fused_tensor_and_the_output_projection(tmp_path: Path) -> None:
    source = floats(tmp_path / "floats", "phi3")
    folder = quantize_folder(
        source, tmp_path / "pack", "pack", lambda name: "_proj" in name or "lm_head" in name
    )
    weights = load_weights(folder, EngineConfig(dtype="bfloat16"))
    plain = load_pretrained(folder, "float32")
    for name, packed in kernels_of(weights).items():
        assert isinstance(packed, PackedWeight)
        assert (packed.precision, packed.group) == ("int4", 32)
        wide = jnp.asarray(plain.lm_head.kernel[...])
        if name != "lm_head/kernel":
            _, part, module, _ = name.split("/")
            wide = getattr(getattr(plain.layers, part), module).kernel[...]
        np.testing.assert_array_equal(packed.unpack(), wide.astype(jnp.bfloat16))


def test_what_products_cannot_take_is_dequantized_and_said(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = quantize_folder(
        llama,
        tmp_path / "pack",
        "pack",
        lambda name: "_proj" in name and name != "model.layers.1.mlp.down_proj.weight",
    )
    with caplog.at_level(logging.INFO, "fornax.llm"):
        found = kernels_of(load_weights(folder, EngineConfig(dtype="float32")))
    (line,) = [text for text in caplog.messages if "quantized weights" in text]
    assert "layers/mlp/down: dequantized, not all its layers are quantized" in line
    assert "layers/mlp/gate, layers/mlp/up: int4 by 32 inputs as stored" in line
    assert found["layers/mlp/down/kernel"].precision == "float32"
    wanted = load_pretrained(folder, "float32").layers.mlp.down.kernel[...]
    np.testing.assert_array_equal(found["layers/mlp/down/kernel"].unpack(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
def test_what_is_described_is_what_is_loaded(options, llama: Path, tmp_path: Path) -> None:
    """`quantization` rounds again what the file has."""
    folder = quantize_folder(llama, tmp_path / "gptq", "gptq")
    config = EngineConfig(dtype="bfloat16", **options)
    weights = load_weights(folder, config)
    model, formats = config_from_hf(read_config(folder)), stored_code_formats(folder)
    described = describe_weights(model, config, jnp.dtype(jnp.bfloat16), CPU, formats)
    assert described.nbytes == weights.nbytes
    assert nnx.to_pure_dict(described.state).keys() == nnx.to_pure_dict(weights.state).keys()
    for name, packed in kernels_of(weights).items():
        expected = "int8" if options else "bfloat16" if name == "lm_head/kernel" else "int4"
        assert packed.precision == expected


def test_over_devices_weights_are_floats(llama: Path, tmp_path: Path) -> None:
    folder = quantize_folder(llama, tmp_path / "gptq", "gptq")
    weights = load_weights(folder, EngineConfig(dtype="float32", tensor_parallel_size=2))
    plain = load_pretrained(folder, "float32").layers.attention.q.kernel[...]
    np.testing.assert_array_equal(kernels_of(weights)["layers/attention/q/kernel"], plain)


@pytest.mark.slow
def test_other_weights_are_rounded_to_the_files_formats(llama: Path, tmp_path: Path) -> None:
    folder = quantize_folder(llama, tmp_path / "gptq", "gptq")
    weights = load_weights(folder, EngineConfig(dtype="float32"))
    model = load_pretrained(llama)
    adopted = kernels_of(weights.adopt(model))["layers/mlp/up/kernel"]
    assert (adopted.precision, adopted.group) == ("int4", 32)
    wanted = model.layers.mlp.up.kernel[...]
    np.testing.assert_allclose(adopted.unpack(), wanted, atol=float(jnp.abs(wanted).max()) / 15)


# GGUF files


@pytest.mark.parametrize("tied", one_in(2, [True, False]))
def test_a_gguf_files_own_blocks_are_served(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They stand for the numbers that the file dequantizes to, bit for bit, whatever the order of
    the rows of heads; what is not multiplied as it is stored is named with the reason."""
    path = gguf_file(tmp_path / "model.gguf", tied=tied)
    with caplog.at_level(logging.INFO, "fornax.llm"):
        weights = load_weights(path, EngineConfig(dtype="float32"))
    (line,) = [text for text in caplog.messages if "quantized weights" in text]
    table = "Q6_K" if tied else "Q8_0"
    for said in (
        f"lm_head: {table} as stored",
        "layers/attention/q: Q4_K as stored",
        "layers/attention/k: Q5_0 and Q8_0 as stored",
        "layers/mlp/up: dequantized, no product takes blocks of Q4_1",
        "layers/mlp/down: dequantized, not all its layers are quantized",
    ):
        assert said in line
    assert "norm" not in line
    model = load_pretrained(path, "float32")
    wanted = {
        "/".join(map(str, key)): np.asarray(x.get_value())
        for key, x in nnx.to_flat_state(nnx.state(model))
    }
    wanted.setdefault("lm_head/kernel", wanted["embed/embedding"].T)
    found = kernels_of(weights)
    for name, packed in found.items():
        assert isinstance(packed, PackedWeight)
        np.testing.assert_array_equal(packed.unpack(), wanted[name], name)
    assert found["layers/attention/v/kernel"].kinds == ("Q6_K", "Q4_K")
    assert found["layers/mlp/down/kernel"].precision == "float32"
    described = describe_weights(
        config_from_hf(read_config(path)),
        EngineConfig(dtype="float32"),
        jnp.dtype(jnp.float32),
        CPU,
        stored_code_formats(path),
    )
    assert described.nbytes == weights.nbytes
    with pytest.raises(EngineError, match=r"own blocks .* with --quantization int8"):
        weights.adopt(model)


def test_experts_of_a_gguf_file_are_dequantized_beside_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_file(tmp_path / "model.gguf", experts=3)
    with caplog.at_level(logging.INFO, "fornax.llm"):
        weights = load_weights(path, EngineConfig(dtype="float32"))
    (line,) = [text for text in caplog.messages if "quantized weights" in text]
    assert "layers/attention/q: Q4_K as stored" in line
    assert "layers/experts/down: dequantized, no product of experts takes blocks" in line
    found, wanted = kernels_of(weights), load_pretrained(path, "float32").layers.experts
    for name in ("gate", "up", "down"):
        floats = found[f"layers/experts/{name}/kernel"]
        np.testing.assert_array_equal(floats, getattr(wanted, name).kernel[...])
    packed = found["layers/attention/v/kernel"]
    assert isinstance(packed, PackedWeight)
    assert packed.kinds == ("Q6_K", "Q4_K")


def test_a_gguf_file_is_rounded_anew_or_dequantized_where_asked(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "model.gguf")
    anew = kernels_of(load_weights(path, EngineConfig(quantization="int8")))
    assert {packed.precision for packed in anew.values()} == {"int8"}
    spread = kernels_of(load_weights(path, EngineConfig(dtype="float32", tensor_parallel_size=2)))
    wanted = load_pretrained(path, "float32").layers.attention.q.kernel[...]
    np.testing.assert_array_equal(spread["layers/attention/q/kernel"], wanted)


def test_scales_of_blocks_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    raw = random_blocks("Q4_K", 256, 256)
    raw[-1, :2] = np.frombuffer(np.float16("inf").tobytes(), np.uint8)
    path = gguf_file(tmp_path / "model.gguf")
    good = random_blocks("Q4_K", 256, 256, spread=1e-3).tobytes()
    data = path.read_bytes()
    assert data.count(good) >= 1
    path.write_bytes(data.replace(good, raw.tobytes(), 1))
    with pytest.raises(CheckpointError, match=r"blk.0.attn_q.weight .Q4_K. holds scales"):
        load_weights(path, EngineConfig(dtype="float32"))
