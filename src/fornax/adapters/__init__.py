"""Low-rank adapters on any NNX model: LoRA, DoRA, rsLoRA, QLoRA, and PEFT's files."""

from fornax.adapters.attach import attach, detach, disabled, is_adapted
from fornax.adapters.config import LoRA
from fornax.adapters.load import load_quantized
from fornax.adapters.merge import merge, merged, merged_params, unmerge
from fornax.adapters.module import LoRAParam, QuantizedParam
from fornax.adapters.peft import load_peft, save_peft
from fornax.adapters.stored import held_codes

__all__ = [
    "LoRA",
    "LoRAParam",
    "QuantizedParam",
    "attach",
    "detach",
    "disabled",
    "held_codes",
    "is_adapted",
    "load_peft",
    "load_quantized",
    "merge",
    "merged",
    "merged_params",
    "save_peft",
    "unmerge",
]
