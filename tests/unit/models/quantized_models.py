"""Directories of small models whose projections are quantized to the nearest code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from tests.unit.models.quantized_files import E2M1, awq_words, by_columns, by_rows, write_file

__all__ = ["GROUP", "SCHEMES", "quantize_folder"]

GROUP = 32
"""Inputs that share a scale, but for fp8, where all do."""
Tensors = dict[str, np.ndarray]


def _grouped(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(len(weight), -1, GROUP)


def _between(weight: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0 to 15 [O, I], scales and zero points [O, groups]: from least to greatest."""
    grouped = _grouped(weight)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / 15).astype(dtype)
    wide = scales.astype(np.float32)[..., None]
    zeros = np.clip(np.round(-low / wide[..., 0]), 1, 15)
    codes = np.clip(np.round(grouped / wide) + zeros[..., None], 0, 15)
    return codes.reshape(weight.shape).astype(int), scales, zeros.astype(int)


def _gptq(weight: np.ndarray) -> Tensors:
    codes, scales, zeros = _between(weight, np.float16)
    groups = np.arange(weight.shape[1], dtype=np.int32) // GROUP
    words = {"qweight": by_columns(codes.T, 4), "qzeros": by_rows(zeros.T - 1, 4)}
    return {**words, "scales": scales.T, "g_idx": groups}


def _gptq_order(weight: np.ndarray) -> Tensors:
    """In an activation order that differs between sizes of outputs."""
    outputs, inputs = weight.shape
    order = np.random.default_rng(outputs).permutation(inputs)
    codes, scales, zeros = _between(weight[:, order], np.float16)
    groups, back = np.arange(inputs, dtype=np.int32) // GROUP, np.argsort(order)
    words = {"qweight": by_columns(codes[:, back].T, 4), "qzeros": by_rows(zeros.T - 1, 4)}
    return {**words, "scales": scales.T, "g_idx": groups[back]}


def _awq(weight: np.ndarray) -> Tensors:
    codes, scales, zeros = _between(weight, np.float16)
    return {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T}


def _pack(weight: np.ndarray) -> Tensors:
    scales = np.abs(_grouped(weight)).max(-1) / np.float32(7)
    codes = np.round(_grouped(weight) / scales[..., None]).reshape(weight.shape).astype(int)
    shape = np.array(weight.shape, np.int64)
    return {"weight_packed": by_rows(codes + 8, 4), "weight_shape": shape, "weight_scale": scales}


def _fp8(weight: np.ndarray) -> Tensors:
    scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
    codes = (weight / scales.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}


def _mxfp4(weight: np.ndarray) -> Tensors:
    exponents = np.floor(np.log2(np.abs(_grouped(weight)).max(-1))).astype(int) - 2
    scaled = np.abs(_grouped(weight)) / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - np.array(E2M1)).argmin(-1).reshape(weight.shape)
    codes = (codes | np.where(weight < 0, 8, 0)).astype(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": (exponents + 127).astype(np.uint8)}


def _fp8_blocks(weight: np.ndarray) -> Tensors:
    """Blocks of 32 by 32."""
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    padded = np.zeros((rows * GROUP, columns * GROUP), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = np.abs(padded).reshape(rows, GROUP, columns, GROUP).max((1, 3)) / np.float32(448)
    each = np.repeat(np.repeat(scales, GROUP, 0), GROUP, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": (weight / each).astype(ml_dtypes.float8_e4m3fn), "weight_scale_inv": scales}


def _mxfp4_experts(weight: np.ndarray) -> Tensors:
    """Of a tensor of all experts [E, I, O], as gpt-oss has it."""
    made = [_mxfp4(np.ascontiguousarray(matrix.T)) for matrix in weight]
    blocks = np.stack([each["weight_packed"] for each in made])
    shape = (*blocks.shape[:2], weight.shape[1] // GROUP, 16)
    scales = np.stack([each["weight_scale"] for each in made])
    return {"blocks": blocks.reshape(shape), "scales": scales}


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


_INTEGERS = {"bits": 4, "group_size": GROUP}
SCHEMES: dict[str, tuple[Callable[[np.ndarray], Tensors], dict[str, Any]]] = {
    "gptq": (_gptq, {"quant_method": "gptq", "sym": False, "desc_act": False, **_INTEGERS}),
    "gptq-order": (
        _gptq_order,
        {"quant_method": "gptq", "sym": False, "desc_act": True, **_INTEGERS},
    ),
    "fp8-blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "gpt-oss": (_mxfp4_experts, {"quant_method": "mxfp4"}),
    "awq": (_awq, {"quant_method": "awq", "zero_point": True, "version": "gemm", **_INTEGERS}),
    "pack": (
        _pack,
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
    ),
    "fp8": (
        _fp8,
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "mxfp4": (
        _mxfp4,
        _compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=GROUP
        ),
    ),
}
"""What a weight [O, I] becomes, and the quantization_config, by name; `gpt-oss` takes tensors of
all experts."""


def quantize_folder(
    source: Path,
    folder: Path,
    scheme: str,
    picks: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> Path:
    """A quantized copy of a directory of floats.

    Args:
      source: the directory, of one file.
      folder: where the copy goes.
      scheme: one of `SCHEMES`.
      picks: whether a tensor is quantized, by its name.
    """
    quantize, config = SCHEMES[scheme]
    stored: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not picks(name):
            stored[name] = tensor
            continue
        parts = quantize(tensor.astype(np.float32))
        module = name.removesuffix(".weight")
        between = "_" if scheme == "gpt-oss" else "."
        stored |= {f"{module}{between}{part}": value for part, value in parts.items()}
    folder.mkdir()
    write_file(folder / "model.safetensors", stored)
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))
    return folder
