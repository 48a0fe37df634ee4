"""NVFP4 and FP8 of TensorRT Model Optimizer (`quant_method: modelopt`).

NVFP4: `weight` uint8 [O, I / 2], two codes a byte, the low bits' first; `weight_scale`
float8_e4m3fn [O, I / 16]; `weight_scale_2` one float32. A weight is code x (scale x scale_2) in
float32 (modelopt, `qtensor/nvfp4_tensor.py`). FP8: `weight` float8_e4m3fn [O, I] and one
`weight_scale`. Activations and caches that such a config quantizes stay floats here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.models.families.quantized.bits import nibbles
from fornax.models.families.quantized.fp8 import Fp8
from fornax.models.families.quantized.tensors import (
    FLOAT32,
    DequantizedTensor,
    Module,
    Tensor,
    finite,
    modules,
    refuse,
    scalar,
)
from fornax.models.families.reader import ConfigReader

__all__ = ["Nvfp4", "read_modelopt"]


@dataclass(frozen=True)
class Nvfp4:
    """The format of a file."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        unused = ("input_scale", "k_scale", "v_scale")
        quantized, others = modules(stored, "weight_scale_2", ("weight", "weight_scale"), unused)
        made = {f"{module.name}.weight": _weight(module, dtype) for module in quantized}
        return {**others, **made}


def _weight(module: Module, dtype: np.dtype | None) -> DequantizedTensor:
    codes = module.take("weight", "uint8")
    outputs, inputs = codes.shape[0], codes.shape[1] * 2
    if inputs % 16:
        refuse(codes, f"has {inputs} inputs, which groups of 16 do not divide")
    scales = module.take("weight_scale", "float8_e4m3fn", shape=(outputs, inputs // 16))
    whole = module.parts["weight_scale_2"]
    module.take("weight_scale_2", "float32", shape=whole.shape)
    return DequantizedTensor(
        f"{module.name}.weight",
        dtype or np.dtype("bfloat16"),
        (outputs, inputs),
        FLOAT32,
        partial(_values, codes, scales, whole),
    )


def _values(
    codes: StoredTensor, scales: StoredTensor, whole: StoredTensor, start: int, stop: int
) -> np.ndarray:
    held = finite(scales.view()[start:stop], scales) * scalar(whole)
    return nibbles(codes.view()[start:stop]) * np.repeat(held, 16, axis=1)


def read_modelopt(reader: ConfigReader) -> Nvfp4 | Fp8:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a value that is not supported.
    """
    for key in ("producer", "config_groups", "ignore", "exclude_modules"):  # their tensors say it
        reader.take(key, None)
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):  # of computing, not weights
        reader.take(key, None)
    algorithms = {"NVFP4": Nvfp4(), "W4A16_NVFP4": Nvfp4(), "FP8": Fp8(None)}
    found = reader.choose("quant_algo", algorithms)
    reader.expect("group_size", None, 16)
    return found  # pyrefly: ignore[bad-return]
