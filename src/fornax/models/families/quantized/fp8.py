"""FP8 with a scale for each block or tensor (`quant_method: fp8`; DeepSeek V3, Qwen3, MiniMax).

A weight is float8_e4m3fn [O, I]; block (r, c) of `weight_block_size` is multiplied by element
(r, c) of `weight_scale_inv`, in float32 (DeepSeek-V3 technical report, 3.3.2). Without blocks the
scale is one number. What activations are rounded to when such a model computes is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import ConfigError
from fornax.models.families.quantized.codes import floats
from fornax.models.families.quantized.tensors import (
    FLOAT32,
    DequantizedTensor,
    Module,
    Tensor,
    blocks_of,
    finite,
    modules,
    over_blocks,
    refuse,
    scalar,
)
from fornax.models.families.reader import ConfigReader

__all__ = ["Fp8", "read_fp8"]

_SCALES = ("weight_scale_inv", "weight_scale")
_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class Fp8:
    """The format of a file."""

    block: tuple[int, int] | None
    """Rows and columns that share a scale; None where a tensor has one."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        unused = ("activation_scale", "input_scale", "k_scale", "v_scale")
        quantized, others = modules(stored, _SCALES, ("weight",), unused)
        made = {f"{module.name}.weight": self._weight(module, dtype) for module in quantized}
        return {**others, **made}

    def _weight(self, module: Module, dtype: np.dtype | None) -> DequantizedTensor:
        weight = module.take("weight", "float8_e4m3fn")
        name, *more = (part for part in _SCALES if part in module)
        if more:
            refuse(weight, f"has both {name} and {more[0]}, and one of them belongs there")
        scales = module.parts[name]
        if self.block is None:
            if scales.shape not in ((), (1,), (1, 1)):
                refuse(
                    scales,
                    f"has shape {list(scales.shape)}, and without weight_block_size a tensor has "
                    "one scale",
                )
            module.take(name, *_DTYPES, shape=scales.shape)
            block = weight.shape[0], weight.shape[1]
            rows = partial(_of_tensor, weight, scales)
        else:
            block = min(self.block[0], weight.shape[0]), min(self.block[1], weight.shape[1])
            module.take(name, *_DTYPES, shape=blocks_of(weight.shape, block))
            rows = partial(_of_blocks, weight, scales, block)
        stored = scales.dtype if scales.dtype.itemsize > 1 else None
        found = dtype or stored or np.dtype("bfloat16")
        codes = partial(
            floats,
            block[1],
            weight.shape[1],
            weight.view,
            partial(_by_output, weight, scales, block),
        )
        return DequantizedTensor(weight.name, found, weight.shape, FLOAT32, rows, codes=codes)


def _of_tensor(weight: StoredTensor, scale: StoredTensor, start: int, stop: int) -> np.ndarray:
    return weight.view()[start:stop].astype(np.float32) * scalar(scale)


def _of_blocks(
    weight: StoredTensor, scales: StoredTensor, block: tuple[int, int], start: int, stop: int
) -> np.ndarray:
    held = scales.view()[start // block[0] : (stop - 1) // block[0] + 1]
    each = over_blocks(finite(held, scales), block, start, stop, weight.shape[1])
    return weight.view()[start:stop].astype(np.float32) * each


def _by_output(weight: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> np.ndarray:
    """Scales for each output: float32 [O, groups of inputs]."""
    held = finite(scales.view(), scales).reshape(blocks_of(weight.shape, block))
    return held[np.arange(weight.shape[0]) // block[0]]


def read_fp8(reader: ConfigReader) -> Fp8:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a value that is not supported.
    """
    for key in ("activation_scheme", "kv_cache_scheme", "dequantize"):  # of computing, not weights
        reader.take(key, None)
    for key in ("modules_to_not_convert", "ignored_layers"):  # their tensors say it
        reader.take(key, None)
    reader.expect("fmt", "e4m3", "float8_e4m3fn")
    reader.expect("scale_fmt", None, "float", "ue8m0")
    reader.expect("expert_dtype", None, "fp8")
    reader.expect("modules_to_convert", None, [])
    block = reader.take("weight_block_size", None)
    if block is None:
        return Fp8(None)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"{reader.source}: weight_block_size={block!r} is not supported; it has two whole "
            "numbers above 0, rows and columns, or is null"
        )
    return Fp8((sizes[0], sizes[1]))
