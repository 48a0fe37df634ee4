"""Adapters of a denoiser: files of diffusers and PEFT, merged, or one for each row of a batch."""

from fornax.diffusion.lora.files import LORA_FILE, Adapter, merge_lora, read_lora, save_lora
from fornax.diffusion.lora.rows import ByRow

__all__ = ["LORA_FILE", "Adapter", "ByRow", "merge_lora", "read_lora", "save_lora"]
