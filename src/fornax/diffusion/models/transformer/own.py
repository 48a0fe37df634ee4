"""Transformers of our own: a short config to train one from scratch, and files of any."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from flax import nnx

from fornax.config import from_mapping, to_mapping
from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key, parameters
from fornax.diffusion.models.parts import Activation
from fornax.diffusion.models.transformer.config import (
    OWN_CLASS,
    BlockConfig,
    CrossConfig,
    EmbedderConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    Run,
    SinCosConfig,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import RMS
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["OWN", "DiTConfig"]


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """A DiT to train from scratch, in few numbers: adaLN-Zero blocks over patches.

    `transformer` makes the config that says it all.
    """

    channels: int = 3
    """Of the sample: of pixels, or of latents."""
    patch: int = 2
    """Places of a patch along rows and columns."""
    frame_patch: int | None = None
    """Of videos, frames of a patch; None for images."""
    num_layers: int = 6
    num_heads: int = 4
    head_dim: int = 32
    text_width: int | None = None
    """Width of the text encoder's states; None for no text."""
    text: Literal["joint", "cross"] = "joint"
    """Whether text and sample attend as one sequence, each with weights of its own, or the sample
    to the text."""
    classes: int | None = None
    """Classes; None for no classes."""
    pooled: int | None = None
    """Width of one vector for the whole text; None for none."""
    positions: Literal["rope", "sincos"] = "rope"
    base: int = 16
    """Patches along an axis at which added positions are whole numbers."""
    qk_norm: bool = True
    """Whether queries and keys of each head are normalised."""
    gated: bool = False
    """Whether MLPs are gated; with F of two thirds they have as many weights."""
    activation: Activation = "gelu_tanh"
    mlp_ratio: float = 4.0
    """Hidden width of MLPs over the model's."""

    def __post_init__(self) -> None:
        """Check what the transformer's own config would name otherwise.

        Raises:
          ConfigError: sizes that are not positive, a head that rope cannot divide over the axes,
            added positions for videos.
        """
        for name in ("num_layers", "num_heads", "head_dim", "patch", "frame_patch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if not 0 < self.mlp_ratio < math.inf:
            raise ConfigError(f"mlp_ratio={self.mlp_ratio:g} must be above 0; 4 is usual")
        turns = self.positions == "rope" and self.head_dim % 2 == 0 and self.head_dim >= 6
        if self.frame_patch is not None and not turns:
            raise ConfigError(
                f"positions={self.positions!r}, head_dim={self.head_dim}: of videos rotary "
                "embeddings of frames, rows and columns need pairs of each; use positions 'rope' "
                "and an even head_dim of at least 6"
            )
        if self.frame_patch is None and self.positions == "rope" and self.head_dim % 4:
            raise ConfigError(
                f"head_dim={self.head_dim} is not a multiple of 4, and rotary embeddings of rows "
                "and columns need pairs of both; use a multiple of 4, or positions 'sincos'"
            )

    def transformer(self) -> TransformerConfig:
        """The transformer."""
        width = self.num_heads * self.head_dim
        mlp = MLPConfig(
            kind="gated" if self.gated else "plain",
            hidden=max(1, int(width * self.mlp_ratio)),
            activation=self.activation,
        )
        qk_norm = RMS if self.qk_norm else None
        joint = self.text_width is not None and self.text == "joint"
        cross = None
        if self.text_width is not None and not joint:
            cross = CrossConfig(
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                norm=NormConfig(scale=True, bias=True),
                qk_norm=qk_norm,
            )
        block = BlockConfig(
            kind="joint" if joint else "sequential", qk_norm=qk_norm, cross=cross, mlp=mlp
        )
        runs = [Run(block=block, count=self.num_layers)]
        if joint:  # of the last block nobody reads the text
            last = replace(block, text_ends=True)
            runs = [Run(block=block, count=self.num_layers - 1)] if self.num_layers > 1 else []
            runs.append(Run(block=last, count=1))
        text = None
        if self.text_width is not None:
            text = TextConfig(width=self.text_width, projection="linear" if joint else "mlp")
        # Rows and columns alike; of videos a third each, in pairs, and frames the rest.
        count = 2 if self.frame_patch is None else 3
        side = self.head_dim // 2 if count == 2 else self.head_dim // 6 * 2
        axes = (self.head_dim - 2 * side, side, side)[3 - count :]
        rope = RopeConfig(axes=axes, theta=100.0, sample_axes=tuple(range(count)))
        frames = () if self.frame_patch is None else (self.frame_patch,)
        return TransformerConfig(
            channels=self.channels,
            patch=(*frames, self.patch, self.patch),
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            blocks=tuple(runs),
            positions=rope if self.positions == "rope" else SinCosConfig(base=self.base),
            embedder=EmbedderConfig(classes=self.classes, pooled=self.pooled),
            text=text,
        )


def _read(fields: Fields) -> TransformerConfig:
    return from_mapping(TransformerConfig, {"class_name": OWN_CLASS, **fields.rest()})


def _write(config: TransformerConfig) -> dict[str, Any]:
    values = dict(to_mapping(config))
    del values["class_name"]
    return values


def _keys(config: TransformerConfig) -> list[Key]:
    """Every parameter by its own path, as it is."""
    module = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return [Key(path, path.replace("/", "."), as_is=True) for path in parameters(module)]


OWN = Component(
    class_name=OWN_CLASS,
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
