"""The keys of config.json that families share, read and written."""

from collections.abc import Mapping, Sequence
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.families.reader import ConfigReader, as_list

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_NAMES",
    "LINEAR_KINDS",
    "layer_types",
    "read_common",
    "read_layer_types",
    "read_vocabulary",
    "shortest_pattern",
    "write_common",
    "write_vocabulary",
]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's names of activations to ours."""
ACTIVATION_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""And back."""

_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
LINEAR_KINDS = {"full_attention": "full", "linear_attention": "linear"}
"""Of families whose other layers are linear."""


def read_common(
    reader: ConfigReader,
    *,
    tied: bool,
    activation_key: str = "hidden_act",
    width_key: str = "intermediate_size",
    eps: float = 1e-6,
) -> dict[str, Any]:
    """The fields of `DecoderConfig` that every family has, rope and attention pattern aside.

    Args:
      reader: the file.
      tied: the family's default for `tie_word_embeddings`.
      activation_key: what the family calls its activation.
      width_key: what it calls the width inside its MLPs.
      eps: the family's default for `rms_norm_eps`.

    Raises:
      ConfigError: for a missing size or an activation that is not supported.
    """
    return {
        "vocab_size": reader.take("vocab_size"),
        "hidden_size": reader.take("hidden_size"),
        "intermediate_size": reader.take(width_key),
        "num_layers": reader.take("num_hidden_layers"),
        "num_heads": reader.take("num_attention_heads"),
        "num_kv_heads": reader.take("num_key_value_heads", None),
        "head_dim": reader.take("head_dim", None),
        "max_position_embeddings": reader.take("max_position_embeddings"),
        "norm_eps": reader.take("rms_norm_eps", eps),
        "activation": reader.choose(activation_key, ACTIVATIONS),
        "initializer_range": reader.take("initializer_range", 0.02),
        **read_vocabulary(reader, tied=tied),
    }


def read_vocabulary(reader: ConfigReader, *, tied: bool) -> dict[str, Any]:
    """Special tokens, and whether the output projection is the table of embeddings."""
    return {
        "tie_embeddings": reader.take("tie_word_embeddings", tied),
        "bos_token_id": _token(reader, "bos_token_id"),
        "eos_token_ids": _tokens(reader.take("eos_token_id", None)),
        "pad_token_id": _token(reader, "pad_token_id"),
    }


def _token(reader: ConfigReader, key: str) -> int | None:
    """A token id; -1 has been used for none."""
    value = reader.take(key, None)
    return None if value == -1 else value


def _tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def write_common(config: DecoderConfig, *, activation_key: str = "hidden_act") -> dict[str, Any]:
    """The inverse of `read_common`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        activation_key: ACTIVATION_NAMES[config.activation],
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        **write_vocabulary(config),
    }


def write_vocabulary(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_vocabulary`."""
    eos = config.eos_token_ids
    return {
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": config.pad_token_id,
    }


def read_layer_types(
    reader: ConfigReader,
    num_layers: int,
    window: int | None,
    default: Sequence[str],
    kinds: Mapping[str, str] = _KINDS,
) -> dict[str, Any]:
    """`sliding_window` and `attention_pattern` from `layer_types`.

    Args:
      reader: the file.
      num_layers: how many layers there are.
      window: the window of its sliding layers.
      default: the layer types of a file that names none.
      kinds: the family's names of layer types to ours.

    Raises:
      ConfigError: for a type of layer that is not supported, or a missing window.
    """
    given = reader.take("layer_types", None)
    types = as_list(default if given is None else given, "layer_types", reader, num_layers)
    for kind in types:
        if kind not in kinds:
            raise ConfigError(
                f"{reader.source}: layer type {kind!r} is not supported; use one of "
                f"{', '.join(kinds)}"
            )
    pattern = shortest_pattern([kinds[kind] for kind in types])
    if "sliding" not in pattern:
        return {} if pattern == ("full",) else {"attention_pattern": pattern}
    if window is None:
        raise ConfigError(f"{reader.source} has sliding layers and no sliding_window")
    return {"sliding_window": window, "attention_pattern": pattern}


def shortest_pattern(values: Sequence[object]) -> tuple[Any, ...]:
    """The shortest pattern that, repeated over the layers, gives `values`."""
    for period in range(1, len(values)):
        if all(value == values[i % period] for i, value in enumerate(values)):
            return tuple(values[:period])
    return tuple(values)


def layer_types(config: DecoderConfig) -> list[str]:
    """Hugging Face's `layer_types` of a config."""
    return [_layer_type(kind) for kind in config.layer_kinds()]


def _layer_type(kind: LayerKind) -> str:
    if kind.linear:
        return "linear_attention"
    return "full_attention" if kind.window is None else "sliding_attention"
