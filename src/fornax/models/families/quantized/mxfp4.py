"""MXFP4 of gpt-oss (`quant_method: mxfp4`): experts in blocks of 32 four-bit numbers.

`*_blocks` is uint8 [E, O, I / 32, 16], two codes a byte, the low bits' first; `*_scales` is uint8
[E, O, I / 32], powers of two with a bias of 127 (OCP Microscaling Formats 1.0). Together they are
the tensor [E, I, O] that a float file has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.models.families.quantized.bits import half_bytes, nibbles
from fornax.models.families.quantized.codes import CodeFormat, Codes, StoredCodes
from fornax.models.families.quantized.tensors import (
    BYTES,
    FLOAT32,
    DequantizedTensor,
    Tensor,
    refuse,
)
from fornax.models.families.reader import ConfigReader

__all__ = ["Mxfp4", "powers_of_two", "read_mxfp4"]


@dataclass(frozen=True)
class Mxfp4:
    """The format of a file."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        made: dict[str, Tensor] = {}
        for name, tensor in stored.items():
            if name.endswith("_blocks"):
                name = name.removesuffix("_blocks")
                scales = stored.get(f"{name}_scales")
                if scales is None:
                    refuse(tensor, f"is there and {name}_scales is not")
                made[name] = _experts(name, tensor, scales, dtype)
            elif not name.endswith("_scales"):
                made[name] = tensor
            elif name.removesuffix("_scales") + "_blocks" not in stored:
                refuse(tensor, f"is there and {name.removesuffix('_scales')}_blocks is not")
        return made


def _experts(
    name: str, blocks: StoredTensor, scales: StoredTensor, dtype: np.dtype | None
) -> DequantizedTensor:
    for tensor in (blocks, scales):
        if tensor.dtype != BYTES:
            refuse(tensor, f"is {tensor.dtype.name}, and this format has uint8")
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or 0 in blocks.shape:
        refuse(
            blocks, f"has shape {list(blocks.shape)}, and [E, outputs, blocks, 16] belongs there"
        )
    if scales.shape != blocks.shape[:3]:
        refuse(
            scales, f"has shape {list(scales.shape)}, and {list(blocks.shape[:3])} belongs there"
        )
    experts, outputs, count, _ = blocks.shape
    return DequantizedTensor(
        name,
        dtype or np.dtype("bfloat16"),
        (experts, count * 32, outputs),
        FLOAT32,
        partial(_values, blocks, scales),
        transposed=True,
        codes=lambda: StoredCodes(CodeFormat("mxfp4", 32), partial(_codes, blocks, scales)),
    )


def _codes(blocks: StoredTensor, scales: StoredTensor, expert: int) -> Codes:
    exponents = scales.view()[expert]
    powers_of_two(exponents, scales)  # whether all are numbers
    packed = blocks.view()[expert]
    return Codes(half_bytes(packed.reshape(len(packed), -1)), exponents)


def _values(blocks: StoredTensor, scales: StoredTensor, start: int, stop: int) -> np.ndarray:
    values = nibbles(blocks.view()[start:stop])  # [experts, O, I / 32, 32]
    values *= powers_of_two(scales.view()[start:stop], scales)[..., None]
    return values.reshape(*values.shape[:2], -1)


def powers_of_two(exponents: np.ndarray, tensor: StoredTensor) -> np.ndarray:
    """Scales of the format E8M0, float32: two to the power of a byte less 127.

    Raises:
      CheckpointError: for 255, which is not a number.
    """
    if (exponents == 255).any():
        refuse(tensor, "holds scales of 255, which stand for no number")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def read_mxfp4(reader: ConfigReader) -> Mxfp4:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a value that is not supported.
    """
    for key in ("modules_to_not_convert", "dequantize"):  # their tensors say it
        reader.take(key, None)
    return Mxfp4()
