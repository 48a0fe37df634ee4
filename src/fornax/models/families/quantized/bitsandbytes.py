"""bitsandbytes in four bits (`quant_method: bitsandbytes`): NF4 and FP4, blocks of a flat tensor.

`weight` holds two codes a byte, the high bits' first, of the tensor's numbers in order;
`weight.quant_map` float32 [16] their values; `weight.absmax` the factor of each block of
`blocksize` numbers, float32, or uint8 codes of `weight.nested_quant_map` times
`weight.nested_absmax` of each `nested_blocksize` factors, plus `nested_offset`. The numbers and the
weight's shape and dtype are JSON in `weight.quant_state.bitsandbytes__nf4` (QLoRA, 3; bitsandbytes,
`functional.py`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.models.families.quantized.tensors import (
    BYTES,
    DequantizedTensor,
    Module,
    Tensor,
    finite,
    modules,
    refuse,
    times,
)
from fornax.models.families.reader import ConfigReader

__all__ = ["BitsAndBytes", "read_bitsandbytes"]

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class BitsAndBytes:
    """The format of a file."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        # The codes are `weight` itself, the other parts `weight.absmax` and so on.
        quantized, others = modules(stored, _STATES, _PARTS)
        made: dict[str, Tensor] = {}
        for module in quantized:
            codes = others.get(module.name)
            state = next(module.parts[key] for key in _STATES if key in module)
            if not isinstance(codes, StoredTensor):
                refuse(state, f"is there and {module.name} is not")
            made[module.name] = _weight(module, codes, state, dtype)
        return {**others, **made}


def _weight(
    module: Module, codes: StoredTensor, state: StoredTensor, dtype: np.dtype | None
) -> DequantizedTensor:
    said = _State(state)
    shape, size = said.shape(), said.size("blocksize")
    numbers, blocks = math.prod(shape), -(-math.prod(shape) // size)
    held = math.prod(codes.shape) * codes.dtype.itemsize
    if held != -(-numbers // 2):
        refuse(
            codes, f"holds {held} bytes, and shape {list(shape)} in four bits takes half as many"
        )
    module.take("quant_map", "float32", shape=(16,))
    nested = "nested_absmax" in module
    absmax = module.take("absmax", "uint8" if nested else "float32", shape=(blocks,))
    inner, offset = 1, 0.0
    if nested:
        inner, offset = said.size("nested_blocksize"), said.number("nested_offset")
        module.take("nested_absmax", "float32", shape=(-(-blocks // inner),))
        module.take("nested_quant_map", "float32", shape=(256,))
    factors = _Factors(absmax, module, inner, offset)
    computed = said.dtype()
    values = _Values(codes, module.parts["quant_map"], factors, size, shape[1:], computed)
    return DequantizedTensor(module.name, dtype or computed, shape, computed, values.rows)


class _State:
    """The numbers that a file keeps as JSON in a tensor of bytes."""

    def __init__(self, tensor: StoredTensor):
        if tensor.dtype != BYTES or math.prod(tensor.shape) > 65_536:
            refuse(tensor, "is not a short text of bytes")
        self._tensor, self._said = tensor, {}
        try:
            self._said = json.loads(tensor.view().tobytes())
        except ValueError as error:
            refuse(tensor, f"is not JSON ({error})")
        if not isinstance(self._said, dict):
            refuse(tensor, "is not a mapping of keys")

    def shape(self) -> tuple[int, ...]:
        """The weight's."""
        shape = self._take("shape")
        if not isinstance(shape, list) or not shape or not all(map(_is_size, shape)):
            refuse(self._tensor, f"says shape={shape!r}, which is none")
        return tuple(shape)

    def size(self, key: str) -> int:
        """A number of numbers."""
        size = self._take(key)
        if not _is_size(size):
            refuse(
                self._tensor, f"says {key}={size!r}, which is not a whole number above 0 that fits"
            )
        return size

    def number(self, key: str) -> float:
        """A number."""
        number = self._take(key)
        if isinstance(number, bool) or not isinstance(number, int | float):
            refuse(self._tensor, f"says {key}={number!r}, which is not a number")
        if not math.isfinite(number):
            refuse(self._tensor, f"says {key}={number!r}, which is not finite")
        return float(number)

    def dtype(self) -> np.dtype:
        """What the library dequantizes to."""
        name = self._take("dtype")
        if name not in _DTYPES:
            refuse(self._tensor, f"says dtype={name!r}; it is one of {', '.join(_DTYPES)}")
        return np.dtype(_DTYPES[name])

    def _take(self, key: str) -> Any:
        if key not in self._said:
            refuse(self._tensor, f"has no {key!r}")
        return self._said[key]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


@dataclass(frozen=True)
class _Factors:
    """Of blocks."""

    absmax: StoredTensor
    module: Module
    inner: int
    offset: float

    def of(self, first: int, last: int) -> np.ndarray:
        """Those of some blocks, float32."""
        if "nested_absmax" not in self.module:
            return finite(self.absmax.view()[first:last], self.absmax)
        outer, values = (self.module.parts[x] for x in ("nested_absmax", "nested_quant_map"))
        begin = first // self.inner
        held = finite(outer.view()[begin : (last - 1) // self.inner + 1], outer)
        codes = finite(values.view(), values)[self.absmax.view()[first:last]]
        factors = codes * held[np.arange(first, last) // self.inner - begin]
        return factors + np.float32(self.offset)


@dataclass(frozen=True)
class _Values:
    codes: StoredTensor
    map: StoredTensor
    factors: _Factors
    size: int
    shape: tuple[int, ...]
    """Of a row."""
    dtype: np.dtype

    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `DequantizedTensor.rows`."""
        width = math.prod(self.shape)
        begin, end = start * width, stop * width
        held = self.codes.view().reshape(-1).view(np.uint8)[begin // 2 : -(-end // 2)]
        codes = np.stack([held >> 4, held & 15], axis=1).reshape(-1)
        codes = codes[begin % 2 : begin % 2 + end - begin]
        first = begin // self.size
        factors = self.factors.of(first, (end - 1) // self.size + 1)
        each = factors[np.arange(begin, end) // self.size - first]
        values = times(finite(self.map.view(), self.map)[codes], each, self.dtype)
        return values.reshape(stop - start, *self.shape)


def read_bitsandbytes(reader: ConfigReader) -> BitsAndBytes:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a value that is not supported.
    """
    for key in _HARMLESS:
        reader.take(key, None)
    reader.expect("load_in_8bit", False)
    reader.expect("_load_in_8bit", False)
    reader.expect("load_in_4bit", True)
    reader.expect("_load_in_4bit", True)
    reader.expect("bnb_4bit_quant_type", "nf4", "fp4")
    return BitsAndBytes()


_HARMLESS = (
    # their tensors say it
    "bnb_4bit_quant_storage",
    "bnb_4bit_use_double_quant",
    "llm_int8_skip_modules",
    "modules_to_not_convert",
    # how others compute with it
    "bnb_4bit_compute_dtype",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_threshold",
)
