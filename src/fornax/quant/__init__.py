"""Quantization: a float model's linear layers in low-bit schemes, by rules, measured before it is
kept."""

from fornax.quant.config import QuantConfig, QuantizeConfig, TrainingScheme
from fornax.quant.gguf_file import GGUFReport, quantize_gguf
from fornax.quant.gguf_schemes import GGUF_SCHEMES, GGUFScheme
from fornax.quant.module import ModuleReport, QuantizationRule
from fornax.quant.qat import FakeQuantizer, plan_qat
from fornax.quant.quality import HeldOutText, Quality
from fornax.quant.run import Report, quantize
from fornax.quant.schemes import SCHEMES, Inputs, Scheme
from fornax.quant.search import CANDIDATES, Search, search
from fornax.quant.speed import check_speed
from fornax.quant.training import check_training, quantize_products
from fornax.quant.verify import HeldOut

__all__ = [
    "CANDIDATES",
    "GGUF_SCHEMES",
    "SCHEMES",
    "FakeQuantizer",
    "GGUFReport",
    "GGUFScheme",
    "HeldOut",
    "HeldOutText",
    "Inputs",
    "ModuleReport",
    "Quality",
    "QuantConfig",
    "QuantizationRule",
    "QuantizeConfig",
    "Report",
    "Scheme",
    "Search",
    "TrainingScheme",
    "check_speed",
    "check_training",
    "plan_qat",
    "quantize",
    "quantize_gguf",
    "quantize_products",
    "search",
]
