"""Configs of quantized files: the keys that are known, which module has what, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.models.quantized_files import CASES, write_file

from fornax.checkpoint.safetensors_file import DTYPES, StoredTensor, open_file
from fornax.config.errors import CheckpointError, ConfigError
from fornax.models import DecoderConfig, config_from_hf, config_to_hf
from fornax.models.families.quantized import read_quantization

# compressed-tensors: which module has what


def grouped(*groups: tuple[list[str], dict[str, Any]], ignore: list[str] = []) -> dict[str, Any]:  # noqa: B006
    named = {
        f"g{n}": {"targets": targets, "weights": weights}
        for n, (targets, weights) in enumerate(groups)
    }
    config = {"format": "int-quantized", "config_groups": named, "ignore": ignore}
    return {"quantization_config": {**config, "quant_method": "compressed-tensors"}}


_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor"}


def two_modules(folder: Path) -> dict[str, StoredTensor]:
    """`a.q` with a scale of each output, `b.q` with one."""
    codes = np.ones((3, 4), np.int8)
    write_file(
        folder / "x",
        {
            "a.q.weight": codes,
            "a.q.weight_scale": np.array([[1], [2], [3]], np.float32),
            "b.q.weight": codes,
            "b.q.weight_scale": np.array([5], np.float32),
            "a.q.input_scale": np.ones(1, np.float32),
            "a.q.bias": np.ones(3, np.float32),
        },
    )
    return open_file(folder / "x", DTYPES)


@pytest.mark.parametrize(
    "groups",
    [
        ((["a.q"], _CHANNEL), (["Linear"], _TENSOR)),
        ((["Linear"], _TENSOR), (["re:a.*"], _CHANNEL)),
        ((["re:.*q"], _TENSOR), (["a.q"], _CHANNEL)),
    ],
)
def test_the_closest_target_decides(groups: Any, tmp_path: Path) -> None:
    found = read_quantization(grouped(*groups))
    assert found is not None
    made = found.dequantize(two_modules(tmp_path))
    assert set(made) == {"a.q.weight", "b.q.weight", "a.q.bias"}
    assert made["a.q.weight"].view()[:, 0].tolist() == [1, 2, 3]
    assert made["b.q.weight"].view()[:, 0].tolist() == [5, 5, 5]


def test_a_module_that_no_target_names_or_that_is_ignored_is_refused(tmp_path: Path) -> None:
    stored = two_modules(tmp_path)
    for values, message in (
        (grouped((["a.q"], _CHANNEL)), r"b\.q\.weight_scale belongs to a module that no target"),
        (grouped((["Linear"], _CHANNEL), ignore=["re:b.*"]), r"b\.q.*`ignore` says.*\('re:b"),
    ):
        found = read_quantization(values)
        assert found is not None
        with pytest.raises(CheckpointError, match=message):
            found.dequantize(stored)


# The keys of published files

_WEIGHTS = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
    "type": "int",
}  # fmt: skip
PUBLISHED = {
    "gptq, AutoGPTQ": {
        "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
        "quant_method": "gptq",
    },
    "gptq, optimum": {
        "batch_size": 1, "bits": 8, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
        "group_size": 128, "max_input_length": None, "model_seqlen": None, "pad_token_id": None,
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
        "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
        "use_cuda_fp16": False, "use_exllama": True,
    },
    "gptq, GPTQModel": {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128,
        "lm_head": False, "meta": {"quantizer": ["gptqmodel:2.2.0"]}, "pack_dtype": "int32",
        "quant_method": "gptq", "sym": True,
    },
    "awq": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None,
        "fuse_max_seq_len": None, "group_size": 128, "modules_to_fuse": None,
        "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "fp8, DeepSeek": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    },
    "fp8, Ministral": {
        "activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
        "modules_to_not_convert": ["model.vision_tower", "lm_head"], "weight_block_size": None,
    },
    "compressed-tensors": {
        "config_groups": {
            "group_0": {
                "format": "pack-quantized", "input_activations": None,
                "output_activations": None, "targets": ["Linear"], "weights": _WEIGHTS,
            },
            "group_1": {
                "input_activations": {"dynamic": True, "num_bits": 8, "type": "float"},
                "format": "float-quantized", "targets": ["re:.*self_attn.*"],
                "weights": {
                    **_WEIGHTS, "num_bits": 8, "type": "float", "group_size": None,
                    "strategy": "block", "block_structure": "128x128",
                },
            },
        },
        "format": "mixed-precision", "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.12.2",
    },
    "bitsandbytes": {
        "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    },
    "modelopt": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "quant_method": "modelopt",
    },
}  # fmt: skip
"""Of each producer, the keys that its files have."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_keys_of_published_files_are_known(name: str) -> None:
    found = read_quantization({"quantization_config": PUBLISHED[name]})
    assert found is not None
    assert found.method == PUBLISHED[name]["quant_method"]


# What is refused


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("awq", {"quant_method": "hqq"}, r"quant_method='hqq'.*reads fp8, compressed-tensors"),
        ("awq", {"quant_method": None}, "quant_method=None"),
        ("awq", {"version": "gemv"}, "version='gemv'.*only the layout gemm"),
        ("awq", {"bits": 3}, "bits=3 is not supported; only 4 is"),
        ("awq", {"group_size": 0}, "group_size=0"),
        ("gptq-4", {"bits": 5}, "bits=5 is not supported; use 2, 3, 4 or 8"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("gptq-4", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic="),
        ("gptq-4", {"rotation": "hadamard"}, "rotation='hadamard'"),
        ("gptq-4", {"shuffled": True}, "quantization_config sets shuffled=True"),
        ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt='e5m2'"),
        ("nf4", {"load_in_8bit": True}, "load_in_8bit=True"),
        ("modelopt-nvfp4", {"quant_algo": "MIXED_PRECISION"}, "use one of NVFP4"),
        ("pack-4", {"format": "marlin-24"}, "format='marlin-24'.*use one of int-quantized"),
        ("pack-4", {"transform_config": {"R1": 1}}, "transform_config="),
        ("pack-4", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config="),
        ("pack-4", {"config_groups": {}}, "config_groups={}"),
        (
            "pack-4",
            {"ignore": ["re:("]},
            "ignore has 're:.' ?, which is not a pattern|not a pattern",
        ),
        ("int-channel", {"format": "nvfp4-pack-quantized"}, "int.*num_bits=8.*float of 4 bits"),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_is_refused_by_name(
    name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": {**CASES[name].config, **keys}})


def test_a_familys_config_is_read_without_its_quantization() -> None:
    values = {
        **config_to_hf(DecoderConfig(family="qwen3", qk_norm="head")),
        "quantization_config": CASES["fp8-blocks"].config,
    }
    assert config_from_hf(values).family == "qwen3"
    older = {**values, "compression_config": values.pop("quantization_config")}
    assert config_from_hf(older) == config_from_hf(values)
    with pytest.raises(ConfigError, match="quant_method='gguf'"):
        config_from_hf({**values, "quantization_config": {"quant_method": "gguf"}})
