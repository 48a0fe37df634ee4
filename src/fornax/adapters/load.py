"""Loading a base model for QLoRA: each layer's kernel is quantized as it is read."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from fornax.adapters.attach import attach
from fornax.adapters.config import LoRA
from fornax.adapters.quantize import Blocks, quantize_array
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

    It is what `attach` makes of `load_pretrained`, to the bit. The kernels that are quantized never
    exist together: peak memory is the quantized model's plus a few layers of one kernel.

    Args:
      path: directory with config.json and safetensors files.
      config: what is adapted; `quantize` must say how.
      rngs: draws A; seeds dropout.
      dtype: of the parameters that are not quantized; None keeps the file's.
      compute_dtype: see `Decoder`.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.

    Raises:
      ConfigError: without `quantize`, for patterns that find no module, or a model that is not
        supported.
      CheckpointError: for weights that are missing, damaged or of another shape.
    """
    if config.quantize is None:
        raise ConfigError("load_quantized needs lora.quantize: nf4, int8 or int4")
    stored = open_pretrained(path, dtype, mesh, rules, compute_dtype=compute_dtype)

    def read(module: str, blocks: Blocks) -> tuple[jax.Array, ...]:
        return stored.convert(f"{module}/kernel", lambda kernel: quantize_array(kernel, blocks))

    attach(stored.model, config, rngs=rngs, read=read)
    stored.fill()
    return stored.model
