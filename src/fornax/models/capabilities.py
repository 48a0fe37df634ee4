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
    "serve in int8",
    "vLLM plugin",
    "plan",
    "preflight",
)
"""What is done with a model."""


class _Part(NamedTuple):
    """Something that not every model has."""

    name: str
    found: Callable[[DecoderConfig], bool]
    uses: tuple[str, ...]
    """Which of `MODEL_USES` take it."""
    instead: Mapping[str, str]
    """What to do in place of the others."""


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
        ("train", "tune", "serve", "plan", "preflight"),
        {
            "serve in int8": "serve it in bfloat16",
            "vLLM plugin": "serve it with `fornax serve`",
        },
    ),
    _Part(
        "latent attention",
        lambda config: config.latent is not None,
        ("train", "tune"),
        {
            "serve": "complete prompts with `fornax generate`",
            "serve in int8": "complete prompts with `fornax generate`",
            "vLLM plugin": "complete prompts with `fornax generate`",
            "plan": "compile and time a few steps of it with `fornax train --steps 3`",
            "preflight": "compare a few steps on the mesh with those of one device",
        },
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
