"""Small quantized matrices of every format, packed by plain integers, and what they stand for.

A format's weight is made twice: as its file has it, and number by number in Python's floats from
the layout's description. Nothing here is shared with the readers.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["CASES", "E2M1", "Case", "awq_words", "by_columns", "by_rows", "write_file"]

_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32


def write_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Case(NamedTuple):
    """A quantized module `x`."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    weight: np.ndarray
    """float64: what the module's weight is."""
    computed: Any
    """The dtype that its values are rounded to."""


def words(codes: list[int], bits: int) -> list[int]:
    """Codes as one long integer, cut into words."""
    stream = sum(code << (bits * place) for place, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [stream >> (32 * word) & 0xFFFFFFFF for word in range(count)]


def by_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of each row."""
    return np.array([words(list(map(int, row)), bits) for row in codes], np.uint32).view(np.int32)


def by_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of each column."""
    return np.ascontiguousarray(by_rows(codes.T, bits).T)


def awq_words(codes: np.ndarray) -> np.ndarray:
    """int32 words of each row, eight outputs each in AWQ's order."""

    def word(eight: np.ndarray) -> int:
        return sum(int(eight[output]) << 4 * n for n, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))

    eights = codes.reshape(len(codes), -1, 8)
    return np.array([[word(e) for e in row] for row in eights], np.uint32).view(np.int32)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (rng.random(shape) + 0.1).astype(dtype)


def grid(
    shape: tuple[int, int], value: Callable[[int, int], float], dtype: Any = np.float64
) -> np.ndarray:
    """A matrix, number by number; each rounded to `dtype`."""
    found = np.zeros(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            found[row, column] = np.float64(np.array(value(row, column)).astype(dtype))
    return found


def fp8(
    rng: np.random.Generator,
    block: tuple[int, int] | None,
    dtype: Any,
    shape: tuple[int, int] = (5, 7),
) -> Case:
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    sizes = block or shape
    grids = (math.ceil(shape[0] / sizes[0]), math.ceil(shape[1] / sizes[1]))
    counts = grids if block else ()
    scales = scales_of(rng, counts, dtype)
    held = scales.astype(np.float64).reshape(counts or (1, 1))
    weight = grid(shape, lambda r, c: float(codes[r, c]) * held[r // sizes[0], c // sizes[1]], F32)
    config = {"quant_method": "fp8", "weight_block_size": list(block) if block else None}
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    return Case({**config, "activation_scheme": "dynamic"}, tensors, weight, F32)


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {**group, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def packed(
    rng: np.random.Generator,
    bits: int,
    size: int | None,
    dtype: Any,
    *,
    zeros: str = "",
    ordered: bool = True,
    inputs: int = 12,
) -> Case:
    """`zeros`: none, "packed", or "bytes" as old files have them. `size`: None for outputs."""
    shape = (5, inputs)
    half, width = 2 ** (bits - 1), size or inputs
    codes = rng.integers(-half, half, shape)
    groups = np.arange(inputs) // width
    groups = groups if ordered else rng.permutation(groups)
    scales = scales_of(rng, (5, inputs // width), dtype)
    points = rng.integers(-half, half, scales.shape) if zeros else np.zeros(scales.shape, int)
    held = scales.astype(np.float64)

    def value(row: int, column: int) -> float:
        group = groups[column]
        return (codes[row, column] - points[row, group]) * held[row, group]

    config = _compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=not zeros,
        strategy="group" if size else "channel",
        group_size=size,
        actorder=None if ordered else "group",
    )
    tensors = {
        "x.weight_packed": by_rows(codes + half, bits),
        "x.weight_shape": np.array(shape, np.int64),
        "x.weight_scale": scales,
    }
    if zeros == "packed":
        tensors["x.weight_zero_point"] = by_columns(points + half, bits)
    elif zeros:
        tensors["x.weight_zero_point"] = points.astype(np.int8)
    if not ordered:
        tensors["x.weight_g_idx"] = groups.astype(np.int32)
    return Case(config, tensors, grid(shape, value, dtype), dtype)


def whole(rng: np.random.Generator, layout: str, strategy: str, dtype: Any, zeros: bool) -> Case:
    """Codes of eight bits, each a number of its own."""
    shape, integers = (5, 12), layout == "int-quantized"
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    if not integers:
        codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    block = {"tensor": (5, 12), "channel": (1, 12), "block": (2, 5)}[strategy]
    counts = (math.ceil(5 / block[0]), math.ceil(12 / block[1]))
    scales = scales_of(rng, counts, dtype)
    points = rng.integers(-128, 128, counts) if zeros else np.zeros(counts, int)

    def value(row: int, column: int) -> float:
        at = row // block[0], column // block[1]
        return (float(codes[row, column]) - points[at]) * float(scales[at])

    config = _compressed(
        layout,
        num_bits=8,
        type="int" if integers else "float",
        symmetric=not zeros,
        strategy=strategy,
        block_structure=list(block) if strategy == "block" else None,
    )
    stored = scales.reshape(1) if strategy == "tensor" else scales
    tensors = {"x.weight": codes, "x.weight_scale": stored}
    if zeros:
        tensors["x.weight_zero_point"] = points.astype(np.int8).reshape(stored.shape)
    return Case(config, tensors, grid(shape, value, dtype), dtype)


def _e2m1(code: int) -> float:
    return E2M1[code & 7] * (-1 if code & 8 else 1)


def _pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def nvfp4(rng: np.random.Generator, method: str) -> Case:
    shape = (3, 32)
    codes = rng.integers(0, 16, shape)
    scales = scales_of(rng, (3, 2), ml_dtypes.float8_e4m3fn)
    tensors = {"x.weight_scale": scales}
    if method == "modelopt":
        factor, computed = F32(0.37), F32
        tensors |= {"x.weight": _pairs(codes), "x.weight_scale_2": np.array(factor)}
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        config |= {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
        held = scales.astype(F32) * factor
    else:
        factor, computed = F32(3.7), BF16
        tensors |= {"x.weight_packed": _pairs(codes), "x.weight_global_scale": factor.reshape(1)}
        keys = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
        config = _compressed("nvfp4-pack-quantized", num_bits=4, type="float", **keys)
        held = scales.astype(F32) / factor
    weight = grid(shape, lambda r, c: F32(_e2m1(codes[r, c])) * held[r, c // 16], computed)
    return Case(config, tensors, weight, computed)


def mxfp4_packed(rng: np.random.Generator) -> Case:
    shape = (3, 64)
    codes, scales = rng.integers(0, 16, shape), rng.integers(100, 140, (3, 2))
    weight = grid(shape, lambda r, c: _e2m1(codes[r, c]) * 2.0 ** (scales[r, c // 32] - 127))
    config = _compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    )
    tensors = {"x.weight_packed": _pairs(codes), "x.weight_scale": scales.astype(np.uint8)}
    return Case(config, tensors, weight, BF16)


def mxfp4_experts(rng: np.random.Generator) -> Case:
    codes, scales = rng.integers(0, 16, (2, 3, 64)), rng.integers(0, 140, (2, 3, 2))
    weight = np.zeros((2, 64, 3))
    for expert in range(2):
        weight[expert] = grid(
            (64, 3),
            lambda i, o, e=expert: _e2m1(codes[e, o, i]) * 2.0 ** (scales[e, o, i // 32] - 127),
        )
    tensors = {
        "x.weight_blocks": _pairs(codes).reshape(2, 3, 2, 16),
        "x.weight_scales": scales.astype(np.uint8),
    }
    return Case({"quant_method": "mxfp4", "modules_to_not_convert": []}, tensors, weight, F32)


def awq(rng: np.random.Generator, size: int, inputs: int = 8) -> Case:
    outputs = 16
    width = size if size > 0 else inputs
    codes = rng.integers(0, 16, (inputs, outputs))
    points = rng.integers(0, 16, (inputs // width, outputs))
    scales = scales_of(rng, points.shape, F16)

    tensors = {"x.qweight": awq_words(codes), "x.qzeros": awq_words(points), "x.scales": scales}
    weight = grid(
        (outputs, inputs),
        lambda o, i: (codes[i, o] - points[i // width, o]) * float(scales[i // width, o]),
        F16,
    )
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    return Case({**config, "version": "gemm"}, tensors, weight, F16)


def gptq(
    rng: np.random.Generator,
    bits: int,
    size: int,
    dtype: Any,
    *,
    form: str,
    ordered: bool = True,
    middle: bool = False,
) -> Case:
    """`middle`: whether all zero points are that of symmetric codes."""
    inputs, outputs = 64, 32
    width = size if size > 0 else inputs
    codes = rng.integers(0, 2**bits, (inputs, outputs))
    points = rng.integers(0, 2**bits, (inputs // width, outputs))
    if middle:
        points[:] = 2 ** (bits - 1)
    scales = scales_of(rng, points.shape, dtype)
    groups = np.arange(inputs) // width
    if not ordered:
        groups = rng.permutation(groups)
    shift = int(form == "gptq")
    tensors = {
        "x.qweight": by_columns(codes, bits),
        "x.qzeros": by_rows((points - shift) % 2**bits, bits),
        "x.scales": scales,
    }
    if not ordered:
        tensors["x.g_idx"] = groups.astype(np.int32)
    weight = grid(
        (outputs, inputs),
        lambda o, i: (codes[i, o] - points[groups[i], o]) * float(scales[groups[i], o]),
        dtype,
    )
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}
    return Case(
        {**config, "desc_act": not ordered, "checkpoint_format": form}, tensors, weight, dtype
    )


def nf4(
    rng: np.random.Generator, shape: tuple[int, int], size: int, inner: int, dtype: Any
) -> Case:
    """`inner`: factors of one outer factor; 0 for factors that are floats."""
    count, blocks = math.prod(shape), math.ceil(math.prod(shape) / size)
    codes = rng.integers(0, 16, count)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(F32)
    padded = np.pad(codes, (0, count % 2))
    tensors = {
        "x.weight": (padded[::2] << 4 | padded[1::2]).astype(np.uint8).reshape(-1, 1),
        "x.weight.quant_map": table,
    }
    state = {"quant_type": "nf4", "blocksize": size, "dtype": np.dtype(dtype).name}
    state |= {"shape": list(shape)}
    if inner:
        bytes_ = rng.integers(0, 256, blocks)
        outer = scales_of(rng, (math.ceil(blocks / inner),), F32)
        values = rng.uniform(-1, 1, 256).astype(F32)
        offset = 0.6123
        factors = [
            F32(F32(values[code] * outer[n // inner]) + F32(offset))
            for n, code in enumerate(bytes_)
        ]
        state |= {"nested_blocksize": inner, "nested_offset": offset, "nested_dtype": "float32"}
        tensors |= {
            "x.weight.absmax": bytes_.astype(np.uint8),
            "x.weight.nested_absmax": outer,
            "x.weight.nested_quant_map": values,
        }
    else:
        factors = list(scales_of(rng, (blocks,), F32))
        tensors["x.weight.absmax"] = np.array(factors)
    text = json.dumps(state).encode()
    tensors["x.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    flat = [F32(table[code] * factors[n // size]) for n, code in enumerate(codes)]
    weight = np.array(flat).astype(dtype).astype(np.float64).reshape(shape)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Case(config, tensors, weight, dtype)


def _cases() -> dict[str, Case]:
    def rng() -> np.random.Generator:
        return np.random.default_rng(7)

    e8m0 = ml_dtypes.float8_e8m0fnu
    found = {
        "fp8-blocks": fp8(rng(), (2, 3), F32),
        "fp8-blocks-bfloat16": fp8(rng(), (2, 3), BF16),
        "fp8-blocks-e8m0": fp8(rng(), (2, 3), e8m0),
        "fp8-wider-blocks": fp8(rng(), (128, 128), F32),
        "fp8-tensor": fp8(rng(), None, F32),
        "fp8-blocks-32": fp8(rng(), (2, 32), F32, (5, 80)),
        "fp8-blocks-256": fp8(rng(), (4, 256), BF16, (5, 300)),
        "pack-4": packed(rng(), 4, 4, BF16),
        "pack-4-zeros": packed(rng(), 4, 4, F16, zeros="packed"),
        "pack-4-old-zeros": packed(rng(), 4, 4, F16, zeros="bytes"),
        "pack-4-order": packed(rng(), 4, 4, BF16, zeros="packed", ordered=False),
        "pack-4-groups-32": packed(rng(), 4, 32, BF16, inputs=96),
        "pack-4-groups-64": packed(rng(), 4, 64, F16, zeros="packed", inputs=128),
        "pack-4-groups-256": packed(rng(), 4, 256, F32, zeros="bytes", inputs=512),
        "pack-4-groups-order": packed(rng(), 4, 32, BF16, ordered=False, inputs=96),
        "pack-5": packed(rng(), 5, 32, BF16, zeros="packed", inputs=64),
        "pack-7": packed(rng(), 7, None, F32, zeros="packed"),
        "pack-8-groups-128": packed(rng(), 8, 128, BF16, inputs=256),
        "pack-3": packed(rng(), 3, 6, F32, zeros="packed"),
        "pack-8": packed(rng(), 8, None, BF16, zeros="packed"),
        "nvfp4": nvfp4(rng(), "compressed-tensors"),
        "mxfp4-packed": mxfp4_packed(rng()),
        "modelopt-nvfp4": nvfp4(rng(), "modelopt"),
        "mxfp4-experts": mxfp4_experts(rng()),
        "awq": awq(rng(), 4),
        "awq-groups-32": awq(rng(), 32, inputs=96),
        "awq-one-group": awq(rng(), -1),
        "gptq-4": gptq(rng(), 4, 32, F16, form="gptq"),
        "gptq-4-v2": gptq(rng(), 4, 16, F16, form="gptq_v2"),
        "gptq-4-order": gptq(rng(), 4, 16, F16, form="gptq", ordered=False),
        "gptq-8": gptq(rng(), 8, -1, BF16, form="gptq"),
        "gptq-8-middle": gptq(rng(), 8, 32, F16, form="gptq", middle=True),
        "gptq-3": gptq(rng(), 3, 32, F16, form="gptq"),
        "gptq-2": gptq(rng(), 2, 32, F16, form="gptq_v2"),
        "nf4": nf4(rng(), (6, 10), 8, 0, F16),
        "nf4-odd": nf4(rng(), (3, 5), 4, 0, F32),
        "nf4-nested": nf4(rng(), (6, 10), 4, 4, BF16),
    }
    for strategy in ("tensor", "channel"):
        found[f"int-{strategy}"] = whole(rng(), "int-quantized", strategy, BF16, zeros=False)
        found[f"float-{strategy}"] = whole(rng(), "float-quantized", strategy, BF16, zeros=False)
    found["int-zeros"] = whole(rng(), "int-quantized", "channel", F32, zeros=True)
    found["float-block"] = whole(rng(), "float-quantized", "block", F32, zeros=False)
    return found


CASES = _cases()
"""By name."""
