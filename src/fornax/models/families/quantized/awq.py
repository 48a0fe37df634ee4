"""AWQ (`quant_method: awq`, the layout gemm of AutoAWQ): four bits, a zero point for each group.

`qweight` is int32 [I, O / 8] and `qzeros` int32 [I / group, O / 8]; the eight codes of a word, from
its lowest bits on, are those of outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight. `scales` is float16
[I / group, O]. A weight is (code - zero point) x scale in the scales' dtype (AutoAWQ,
`utils/packing_utils.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import ConfigError
from fornax.models.families.quantized.bits import unpack
from fornax.models.families.quantized.codes import integers
from fornax.models.families.quantized.tensors import (
    FLOATS,
    DequantizedTensor,
    Module,
    Tensor,
    finite,
    modules,
    refuse,
    times,
)
from fornax.models.families.reader import ConfigReader

__all__ = ["Awq", "group_size", "read_awq"]

_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
"""Where in a word each of eight outputs lies."""


@dataclass(frozen=True)
class Awq:
    """The format of a file."""

    group_size: int
    """Inputs that share a scale; -1 for all."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        quantized, others = modules(stored, "qweight", ("qzeros", "scales"))
        made = {f"{module.name}.weight": self._weight(module, dtype) for module in quantized}
        return {**others, **made}

    def _weight(self, module: Module, dtype: np.dtype | None) -> DequantizedTensor:
        codes = module.take("qweight", "int32")
        inputs, outputs = codes.shape[0], codes.shape[1] * 8
        size = self.group_size if self.group_size > 0 else inputs
        if inputs % size:
            refuse(codes, f"has {inputs} inputs, which groups of {size} do not divide")
        zeros = module.take("qzeros", "int32", shape=(inputs // size, codes.shape[1]))
        scales = module.take("scales", *FLOATS, shape=(inputs // size, outputs))
        return DequantizedTensor(
            f"{module.name}.weight",
            dtype or scales.dtype,
            (outputs, inputs),
            scales.dtype,
            partial(_values, codes, zeros, scales, size),
            transposed=True,
            codes=partial(
                integers,
                4,
                size,
                inputs,
                codes=lambda: _in_order(codes.view()).T,
                scales=lambda: finite(scales.view(), scales).T,
                zeros=lambda: _in_order(zeros.view()).T,
            ),
        )


def _values(
    codes: StoredTensor,
    zeros: StoredTensor,
    scales: StoredTensor,
    size: int,
    start: int,
    stop: int,
) -> np.ndarray:
    """Rows of inputs: [stop - start, O]."""
    first, last = start // size, (stop - 1) // size + 1
    groups = np.arange(start, stop) // size - first
    held = finite(scales.view()[first:last], scales)
    points = _in_order(zeros.view()[first:last]).view(np.int8)
    differences = _in_order(codes.view()[start:stop]).view(np.int8) - points[groups]
    return times(differences, held[groups], scales.dtype)


def _in_order(words: np.ndarray) -> np.ndarray:
    codes = unpack(words, 4, words.shape[1] * 8)
    return codes.reshape(*words.shape, 8)[..., _PLACES].reshape(words.shape[0], -1)


def read_awq(reader: ConfigReader) -> Awq:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a value that is not supported.
    """
    for key in ("modules_to_not_convert", "backend"):  # their tensors say it
        reader.take(key, None)
    for key in ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"):
        reader.take(key, None)  # how others compute with it
    reader.expect("bits", 4)
    reader.expect("w_bit", 4)
    reader.expect("zero_point", True)
    version = reader.take("version", "gemm")
    if str(version).lower() != "gemm":
        raise ConfigError(
            f"{reader.source}: version={version!r} is not supported; only the layout gemm is: "
            "quantize it in that, or give the float checkpoint"
        )
    key = "group_size" if "group_size" in reader else "q_group_size"
    return Awq(group_size(reader, key))


def group_size(reader: ConfigReader, key: str = "group_size") -> int:
    """Inputs that share a scale; -1 for all.

    Raises:
      ConfigError: for what is not a number of them.
    """
    size = reader.take(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise ConfigError(
            f"{reader.source}: {key}={size!r} is not supported; it is a whole number above 0, or "
            "-1 for all inputs"
        )
    return size
