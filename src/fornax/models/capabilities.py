"""What takes which kinds of models: one table for code, errors and documentation."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig

__all__ = ["MODEL_USES", "check_model", "models_table"]

MODEL_USES = (
    "train",
    "tune",
    "serve",
    "serve adapters",
    "serve in int8",
    "vLLM plugin",
    "plan",
    "preflight",
    "context axis",
)
"""What is done with a model; the last is a mesh whose `context` divides the length of rows."""


class _Part(NamedTuple):
    """Something that not every model has."""

    name: str
    found: Callable[[DecoderConfig], bool]
    uses: tuple[str, ...]
    """Which of `MODEL_USES` take it."""
    instead: Mapping[str, str]
    """What to do in place of the others."""


_GENERATE = {
    "serve": "complete prompts with `fornax generate`",
    "serve adapters": "complete prompts with `fornax generate`",
    "serve in int8": "complete prompts with `fornax generate`",
    "vLLM plugin": "complete prompts with `fornax generate`",
    "plan": "compile and time a few steps of it with `fornax train --steps 3`",
    "preflight": "compare a few steps on the mesh with those of one device",
}
"""What to do with a model that only the trainer and the plain cache take."""

_PARTS = (
    _Part(
        "dense layers, with any attention of `DecoderConfig`",
        lambda config: "mlp" in config.mlps,
        MODEL_USES,
        {},
    ),
    _Part(
        "mixtures of experts",
        lambda config: config.experts is not None,
        ("train", "tune", "serve", "serve adapters", "plan", "preflight", "context axis"),
        {
            "serve in int8": "serve it in bfloat16",
            "vLLM plugin": "serve it with `fornax serve`",
        },
    ),
    _Part(
        "latent attention",
        lambda config: config.latent is not None,
        ("train", "tune", "serve", "plan", "preflight", "context axis"),
        {
            "serve adapters": "merge the adapter into the model and serve that",
            "serve in int8": "serve it in bfloat16",
            "vLLM plugin": "serve it with `fornax serve`",
        },
    ),
    _Part(
        "chunked attention",
        lambda config: config.attention_chunk is not None,
        tuple(use for use in MODEL_USES if use != "vLLM plugin"),
        {"vLLM plugin": "serve it with `fornax serve`"},
    ),
    _Part(
        "linear attention (gated DeltaNet)",
        lambda config: config.gated_delta is not None,
        ("train", "tune"),
        {**_GENERATE, "context axis": "give its devices to mesh.fsdp or mesh.tensor"},
    ),
    _Part(
        "attention with an output gate",
        lambda config: config.attention_gate,
        ("train", "tune", "context axis"),
        _GENERATE,
    ),
)


def check_model(config: DecoderConfig, use: str) -> None:
    """Refuse a model of which a part is not taken there.

    Raises:
      ConfigError: naming the part, and what to do instead.
    """
    for part in _PARTS:
        if use not in part.uses and part.found(config):
            raise ConfigError(
                f"the model has {part.name}, which is not supported yet ({use}); "
                f"{part.instead[use]}"
            )


def models_table() -> list[tuple[str, ...]]:
    """Rows of the documentation's table: the part, then yes or no for each use."""
    return [
        (
            part.name[0].upper() + part.name[1:],
            *("yes" if use in part.uses else "no" for use in MODEL_USES),
        )
        for part in _PARTS
    ]
