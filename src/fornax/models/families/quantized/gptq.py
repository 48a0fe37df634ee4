"""GPTQ (`quant_method: gptq`; AutoGPTQ, GPTQModel): integers of 2, 3, 4 or 8 bits, by groups.

`qweight` is int32 [I x bits / 32, O], a dense stream of bits down each column; `qzeros` int32
[groups, O x bits / 32], along each row; `scales` a float [groups, O]; `g_idx` int32 [I] the group
of each input. A weight is (code - zero point) x scale in the scales' dtype. The format of version
1, `checkpoint_format: gptq` or none, holds each zero point less 1, in as many bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import ConfigError
from fornax.models.families.quantized.awq import group_size
from fornax.models.families.quantized.bits import unpack, unpack_columns
from fornax.models.families.quantized.codes import StoredCodes, integers
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

__all__ = ["Gptq", "read_gptq"]


@dataclass(frozen=True)
class Gptq:
    """The format of a file."""

    bits: int
    group_size: int
    """Inputs that share a scale; -1 for all."""
    shift: int
    """What is added to stored zero points."""

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        quantized, others = modules(stored, "qweight", ("qzeros", "scales", "g_idx"))
        made = {f"{module.name}.weight": self._weight(module, dtype) for module in quantized}
        return {**others, **made}

    def _weight(self, module: Module, dtype: np.dtype | None) -> DequantizedTensor:
        codes = module.take("qweight", "int32")
        inputs, rest = divmod(codes.shape[0] * 32, self.bits)
        outputs = codes.shape[1]
        if rest or inputs % 32:
            refuse(codes, f"has {codes.shape[0]} rows, which hold no whole runs of 32 codes")
        size = min(self.group_size, inputs) if self.group_size > 0 else inputs
        groups = -(-inputs // size)
        words = (groups, -(-outputs * self.bits // 32))
        scales = module.take("scales", *FLOATS, shape=(groups, outputs))
        zeros = module.take("qzeros", "int32", shape=words)
        if "g_idx" in module:
            module.take("g_idx", "int32", shape=(inputs,))
        values = _Values(codes, zeros, scales, module.parts.get("g_idx"), self, size)
        return DequantizedTensor(
            f"{module.name}.weight",
            dtype or scales.dtype,
            (outputs, inputs),
            scales.dtype,
            values.rows,
            transposed=True,
            codes=values.stored_codes,
        )


@dataclass(frozen=True)
class _Values:
    codes: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    groups: StoredTensor | None
    format: Gptq
    size: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of inputs: [stop - start, O]."""
        bits = self.format.bits
        groups, held = np.unique(self._groups(start, stop), return_inverse=True)
        begin, end = start * bits // 32 // bits * bits, -(-stop // 32) * bits
        first = begin * 32 // bits
        codes = unpack_columns(self.codes.view()[begin:end], bits, stop - first)[start - first :]
        points = self._points(groups)
        scales = finite(self.scales.view()[groups], self.scales)
        return times(codes.astype(np.int16) - points[held], scales[held], self.scales.dtype)

    def stored_codes(self) -> StoredCodes | str:
        """See `DequantizedTensor.codes`."""
        bits, inputs = self.format.bits, self.codes.shape[0] * 32 // self.format.bits
        return integers(
            bits,
            self.size,
            inputs,
            codes=lambda: unpack_columns(self.codes.view(), bits, inputs).T,
            scales=lambda: finite(self.scales.view(), self.scales).T,
            zeros=lambda: self._points(slice(None)).T,
            groups=self._groups(0, inputs),
        )

    def _points(self, groups: np.ndarray | slice) -> np.ndarray:
        """Zero points of groups: uint8 [groups, O]."""
        bits = self.format.bits
        points = unpack(self.zeros.view()[groups], bits, self.codes.shape[1])
        return points + np.uint8(self.format.shift) & np.uint8(2**bits - 1)

    def _groups(self, start: int, stop: int) -> np.ndarray:
        if self.groups is None:
            return np.arange(start, stop) // self.size
        groups, count = self.groups.view()[start:stop], self.scales.shape[0]
        if groups.min(initial=0) < 0 or groups.max(initial=0) >= count:
            refuse(self.groups, f"has groups outside 0 to {count - 1}, those that have scales")
        return groups


def read_gptq(reader: ConfigReader) -> Gptq:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a value that is not supported.
    """
    for key in _HARMLESS:
        reader.take(key, None)
    reader.expect("dynamic", None, {})
    reader.expect("rotation", None)
    reader.expect("is_marlin_format", False)
    reader.expect("pack_dtype", None, "int32")
    reader.expect("quant_algo", None, "GPTQ")
    reader.expect("checkpoint_format", None, "", "gptq", "gptq_v2")
    second = reader.take("checkpoint_format", None) == "gptq_v2"
    bits = reader.take("bits")
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise ConfigError(f"{reader.source}: bits={bits!r} is not supported; use 2, 3, 4 or 8")
    return Gptq(bits, group_size(reader), 0 if second else 1)


_HARMLESS = (
    # what was done to make the file
    "act_group_aware",
    "adapter",
    "autoround_version",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",
    "fail_safe",
    "hyb_act",
    "lm_head",
    "meta",
    "mock_quantization",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "parallel_packing",
    "quantizer",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    # how others compute with it
    "backend",
    "cache_examples_on_gpu",
    "disable_exllama",
    "exllama_config",
    "format",
    "max_input_length",
    "use_cuda_fp16",
    "use_exllama",
)
