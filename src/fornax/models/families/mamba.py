"""Mamba-2: state space layers alone, without attention and MLPs; and the keys of such layers."""

import math
from collections.abc import Mapping
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    read_vocabulary,
    write_vocabulary,
)
from fornax.models.families.family import Family, TensorName
from fornax.models.families.reader import ConfigReader
from fornax.models.mamba_config import Mamba2Config

__all__ = ["MAMBA2", "expansion", "mamba_names", "read_limit"]

_UNLIMITED = (0.0, math.inf)
_POSITIONS = 2**20
"""Tokens of a sequence: the file names no limit, and the layers have none."""


def read_limit(reader: ConfigReader) -> tuple[float, float]:
    """The steps' least and largest, of which JSON may hold infinity in a mapping.

    Raises:
      ConfigError: when it is not two numbers.
    """
    given = reader.take("time_step_limit", _UNLIMITED)
    try:
        low, high = (
            float(each["__float__"] if isinstance(each, Mapping) else each) for each in given
        )
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{reader.source}: time_step_limit={given!r} must be two numbers"
        ) from None
    return low, high


def expansion(mamba: Mamba2Config, hidden_size: int) -> int:
    """How many times as wide the heads are together as the model.

    Raises:
      ConfigError: when it is not a whole number.
    """
    if mamba.value_width % hidden_size:
        raise ConfigError(
            f"mamba2.num_heads={mamba.num_heads} times head_dim={mamba.head_dim}, which is not a "
            f"multiple of hidden_size={hidden_size}"
        )
    return mamba.value_width // hidden_size


def mamba_names(layer: str) -> dict[str, TensorName]:
    """Names of the tensors of Mamba-2, which are under `layer` in the file."""
    start = "layers/mamba2"
    tensors = {
        "in_proj": ("gate", "x", "b", "c", "dt"),
        "conv1d": ("x_conv", "b_conv", "c_conv"),
        "out_proj": ("o",),
    }
    return {
        **{
            f"{start}/{part}/{ours}": f"{layer}.{tensor}.{theirs}"
            for tensor, parts in tensors.items()
            for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
            for part in parts
        },
        f"{start}/dt_bias": f"{layer}.dt_bias",
        f"{start}/a_log": f"{layer}.A_log",
        f"{start}/d": f"{layer}.D",
        f"{start}/norm": f"{layer}.norm.weight",
    }


def _read(reader: ConfigReader) -> DecoderConfig:
    hidden_size = reader.take("hidden_size", 4_096)
    mamba = Mamba2Config(
        num_heads=reader.take("num_heads", 128),
        head_dim=reader.take("head_dim", 64),
        state_dim=reader.take("state_size", 128),
        num_groups=reader.take("n_groups", 8),
        conv_width=reader.take("conv_kernel", 4),
        conv_bias=reader.take("use_conv_bias", True),
        bias=reader.take("use_bias", False),
        dt_limit=read_limit(reader),
    )
    expand = reader.take("expand", 2)
    if hidden_size * expand != mamba.value_width:
        raise ConfigError(
            f"{reader.source}: num_heads={mamba.num_heads} times head_dim={mamba.head_dim} is not "
            f"expand={expand} times hidden_size={hidden_size}"
        )
    # How initial values are drawn, how a kernel cuts rows, and the residual stream's dtype, which
    # here is that of the activations.
    for key in ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"):
        reader.take(key, None)
    for key in ("rescale_prenorm_residual", "chunk_size", "residual_in_fp32"):
        reader.take(key, None)
    # Keys of older files that transformers does not read, with the values it computes by.
    reader.expect("rms_norm", True)
    reader.take("norm_before_gate", None)
    return DecoderConfig(
        **read_vocabulary(reader, tied=False),
        vocab_size=reader.take("vocab_size", 32_768),
        hidden_size=hidden_size,
        num_layers=reader.take("num_hidden_layers", 64),
        num_heads=mamba.num_heads,
        num_kv_heads=mamba.num_heads,
        head_dim=mamba.head_dim,
        max_position_embeddings=_POSITIONS,
        norm_eps=reader.take("layer_norm_epsilon", 1e-5),
        activation=reader.choose("hidden_act", ACTIVATIONS, "silu"),
        initializer_range=reader.take("initializer_range", 0.1),
        attention_pattern=("linear",),
        mamba2=mamba,
        mlp_pattern=("none",),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    mamba = config.mamba2
    if mamba is None:
        raise ConfigError("mamba2=None")
    return {
        **write_vocabulary(config),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": mamba.num_heads,
        "head_dim": mamba.head_dim,
        "state_size": mamba.state_dim,
        "n_groups": mamba.num_groups,
        "conv_kernel": mamba.conv_width,
        "use_conv_bias": mamba.conv_bias,
        "use_bias": mamba.bias,
        "expand": expansion(mamba, config.hidden_size),
        "time_step_limit": list(mamba.dt_limit),
        "layer_norm_epsilon": config.norm_eps,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "initializer_range": config.initializer_range,
    }


_NAMES: dict[str, TensorName] = {
    "embed/embedding": "backbone.embeddings.weight",
    "layers/attention_norm/scale": "backbone.layers.{layer}.norm.weight",
    **mamba_names("backbone.layers.{layer}.mixer"),
    "final_norm/scale": "backbone.norm_f.weight",
    "lm_head/kernel": "lm_head.weight",
}

MAMBA2 = Family("mamba2", "Mamba2ForCausalLM", _read, _write, _NAMES)
