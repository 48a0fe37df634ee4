"""Loading a base model for QLoRA: each layer's kernel is quantized as it is read, or is."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from fornax.adapters.attach import attach
from fornax.adapters.config import LoRA
from fornax.adapters.quantize import Blocks, quantize_array
from fornax.adapters.stored import held_codes, read_codes
from fornax.config.errors import ConfigError
from fornax.mesh import DEFAULT_RULES, Rules
from fornax.models import Decoder, open_pretrained

__all__ = ["load_quantized"]


def load_quantized(
    path: str | Path,
    config: LoRA,
    *,
    rngs: nnx.Rngs,
    dtype: Any = None,
    compute_dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Decoder:
    """The decoder of a Hugging Face directory with adapters on quantized kernels.

    It is what `attach` makes of `load_pretrained`, bit for bit. The kernels that are quantized
    never exist together: peak memory is the quantized model's plus a few layers of one kernel.

    Args:
      path: directory with config.json and safetensors files.
      config: what is adapted; `quantize` must say how.
      rngs: draws A; seeds dropout.
      dtype: of the parameters that are not quantized; None keeps the file's.
      compute_dtype: see `Decoder`.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.

    Raises:
      ConfigError: without `quantize`, for codes that cannot be used, patterns that find no
        module, or a model that is not supported.
      CheckpointError: for weights that are missing, damaged or of another shape.
    """
    if config.quantize is None:
        raise ConfigError("load_quantized needs lora.quantize: nf4, int8, int4 or stored")
    stored = open_pretrained(path, dtype, mesh, rules, compute_dtype=compute_dtype)
    held = held_codes(stored) if config.quantize == "stored" else None

    def read(module: str, blocks: Blocks) -> tuple[jax.Array, ...]:
        kernel = f"{module}/kernel"
        if held is None:
            return stored.convert(kernel, lambda whole: quantize_array(whole, blocks))
        return read_codes(stored, kernel, blocks, held[kernel])

    attach(stored.model, config, rngs=rngs, read=read, held=held)
    stored.fill()
    return stored.model
