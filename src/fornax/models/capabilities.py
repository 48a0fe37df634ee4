"""What takes which kinds of models: one table for code, errors and documentation."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig

__all__ = ["MODEL_USES", "check_model", "models_table", "takes"]

_ENGINE_USES = (
    "serve",
    "prefix reuse",
    "speculation",
    "serve adapters",
    "serve quantized",
    "vLLM plugin",
    "plan serve",
)
"""What only the engine does."""

MODEL_USES = (
    "train",
    "train in 8 bits",
    "tune",
    *_ENGINE_USES,
    "plan",
    "preflight",
    "context axis",
    "stage axis",
)
"""What is done with a model. Prefix reuse: prompts that begin alike are read once; where a model
does not take it, the engine reads them again. Plan serve: the plan of an engine; plan: of training.
Context axis: a mesh whose `context` divides the length of rows. Stage axis: a pipeline."""


class _Part(NamedTuple):
    """Something that not every model has."""

    name: str
    found: Callable[[DecoderConfig], bool]
    instead: Mapping[str, str]
    """Which of `MODEL_USES` do not take it, and what to do in their place."""


_NO_PLUGIN = {"vLLM plugin": "serve it with `fornax serve`"}
_ONLY_FORNAX = {"serve quantized": "serve it in bfloat16"} | _NO_PLUGIN
_NO_PIPELINE = {"stage axis": "give its devices to mesh.fsdp or mesh.tensor"}
_WHOLE_ROWS = {"context axis": "give its devices to mesh.fsdp or mesh.tensor"}

_PARTS = (
    _Part(
        "dense layers, with any attention of `DecoderConfig`",
        lambda config: "mlp" in config.mlps,
        {},
    ),
    _Part(
        "mixtures of experts",
        lambda config: config.experts is not None,
        {"train in 8 bits": "leave quant.scheme out"} | _NO_PLUGIN,
    ),
    _Part(
        "latent attention",
        lambda config: config.latent is not None,
        {"serve adapters": "merge the adapter into the model and serve that"} | _NO_PLUGIN,
    ),
    _Part(
        "chunked attention",
        lambda config: config.attention_chunk is not None,
        _NO_PLUGIN,
    ),
    _Part(
        "linear attention in every layer",
        lambda config: not config.attends,
        _ONLY_FORNAX | _WHOLE_ROWS,
    ),
    _Part(
        "linear attention (gated DeltaNet)",
        lambda config: config.gated_delta is not None,
        _ONLY_FORNAX | _WHOLE_ROWS,
    ),
    _Part(
        "linear attention (Mamba-2)",
        lambda config: config.mamba2 is not None,
        _ONLY_FORNAX | _WHOLE_ROWS,
    ),
    _Part(
        "layers without an MLP",
        lambda config: any(kind.mlp == "none" for kind in config.layer_kinds()),
        _ONLY_FORNAX,
    ),
    _Part(
        "heads of their own in full layers",
        lambda config: config.global_heads is not None,
        {"serve adapters": "merge the adapter into the model and serve that"} | _ONLY_FORNAX,
    ),
    _Part(
        "layers that share keys and values",
        lambda config: config.shared_kv_layers > 0,
        {"serve adapters": "merge the adapter into the model and serve that"}
        | _ONLY_FORNAX
        | _NO_PIPELINE,
    ),
    _Part(
        "inputs of each layer",
        lambda config: config.layer_inputs is not None,
        {"serve adapters": "merge the adapter into the model and serve that"}
        | _ONLY_FORNAX
        | _NO_PIPELINE,
    ),
    _Part(
        "experts beside MLPs, with norms of their own",
        lambda config: config.experts is not None and config.experts.separate_norms,
        _ONLY_FORNAX,
    ),
    _Part(
        "normalised values or scaled layers",
        lambda config: config.value_norm or config.layer_scale,
        _ONLY_FORNAX,
    ),
    _Part(
        "modules that predict further tokens",
        lambda config: config.num_mtp_modules > 0,
        {
            "serve adapters": "leave speculation by `mtp` out, or merge the adapter into the model",
        }
        | _NO_PLUGIN
        | _NO_PIPELINE,
    ),
    _Part(
        "attention with an output gate",
        lambda config: config.attention_gate,
        _ONLY_FORNAX,
    ),
)


def check_model(config: DecoderConfig, use: str) -> None:
    """Refuse a model of which a part is not taken there.

    Raises:
      ConfigError: naming the part, and what to do instead.
    """
    for part in _PARTS:
        if use in part.instead and part.found(config):
            raise ConfigError(
                f"the model has {part.name}, which is not supported yet ({use}); "
                f"{part.instead[use]}"
            )


def takes(config: DecoderConfig, use: str) -> bool:
    """Whether all parts of a model are taken there."""
    return not any(use in part.instead and part.found(config) for part in _PARTS)


def models_table() -> list[tuple[str, ...]]:
    """Rows of the documentation's table: the part, then yes or no for each use."""
    return [
        (
            part.name[0].upper() + part.name[1:],
            *("no" if use in part.instead else "yes" for use in MODEL_USES),
        )
        for part in _PARTS
    ]
