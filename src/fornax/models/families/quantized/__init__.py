"""Quantized weights in Hugging Face files: for each format, what its tensors stand for."""

from fornax.models.families.quantized.codes import CodeFormat, Codes, StoredCodes
from fornax.models.families.quantized.table import (
    FORMATS,
    QUANTIZATION_KEYS,
    formats_table,
    read_quantization,
)
from fornax.models.families.quantized.tensors import DequantizedTensor, Tensor

__all__ = [
    "FORMATS",
    "QUANTIZATION_KEYS",
    "CodeFormat",
    "Codes",
    "DequantizedTensor",
    "StoredCodes",
    "Tensor",
    "formats_table",
    "read_quantization",
]
