"""Hugging Face families: for each, its config.json and its tensor names; how files quantize."""

from fornax.models.families.convert import config_from_hf, config_to_hf, num_modules
from fornax.models.families.family import Family
from fornax.models.families.quantized import (
    CodeFormat,
    Codes,
    DequantizedTensor,
    StoredCodes,
    Tensor,
    formats_table,
    read_quantization,
)
from fornax.models.families.table import FAMILIES, family_by_architecture, family_by_name
from fornax.models.families.wrapper import unwrap_tensors

__all__ = [
    "FAMILIES",
    "CodeFormat",
    "Codes",
    "DequantizedTensor",
    "Family",
    "StoredCodes",
    "Tensor",
    "config_from_hf",
    "config_to_hf",
    "family_by_architecture",
    "family_by_name",
    "formats_table",
    "num_modules",
    "read_quantization",
    "unwrap_tensors",
]
