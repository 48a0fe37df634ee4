"""What stands around a transformer's blocks: the text's way in, shared modulation, the way out.

Legend: B batch, T tokens, S tokens of text, C channels, D width, E width of the embedding.
"""

import functools
import math

import jax
from flax import nnx
from jax.typing import DTypeLike

from fornax.diffusion.models.parts import MLP, Dense, LayerNorm, Make, constrain_tokens
from fornax.diffusion.models.transformer.attention import make_norm
from fornax.diffusion.models.transformer.blocks import vectors_of
from fornax.diffusion.models.transformer.config import BlockConfig, TextConfig, TransformerConfig
from fornax.diffusion.models.transformer.embedder import Modulation, Table
from fornax.models.scope import scoped

__all__ = ["Head", "ImageIn", "Shared", "TextIn"]


class TextIn(nnx.Module):
    """The text encoder's states as the blocks take them."""

    def __init__(
        self,
        config: TextConfig,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the projection and norms that the config names."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        before, after = config.norm_before, config.norm_after
        self.norm_before = None if before is None else make_norm(before, config.width, dtype)
        self.projection = _text_projection(config, width, make)
        self.norm_after = None if after is None else make_norm(after, width, dtype)
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(self, text_BSD: jax.Array) -> jax.Array:
        """States [B, S, their width] -> [B, S, D] in the compute dtype."""
        text_BSD = text_BSD.astype(self.compute_dtype)
        for part in (self.norm_before, self.projection, self.norm_after):
            text_BSD = text_BSD if part is None else part(text_BSD)
        return constrain_tokens(text_BSD, "activation_embed")


def _text_projection(config: TextConfig, width: int, make: Make) -> Dense | MLP | None:
    if config.projection == "linear":
        return Dense(config.width, {"mlp": width}, bias=config.bias, **make)
    if config.projection == "mlp":
        return MLP(config.width, width, width, activation="gelu_tanh", bias=config.bias, **make)
    return None


class ImageIn(nnx.Module):
    """An image encoder's states as the blocks take them: an MLP between two norms."""

    def __init__(
        self,
        states: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts, of states so wide, to the model's width."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.norm_before = LayerNorm(states, eps=1e-5, dtype=dtype)
        self.mlp = MLP(states, states, width, activation="gelu", **make)
        self.norm_after = LayerNorm(width, eps=1e-5, dtype=dtype)
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(self, states_BSD: jax.Array) -> jax.Array:
        """States [B, S, their width] -> [B, S, D] in the compute dtype."""
        states_BSD = self.norm_before(states_BSD.astype(self.compute_dtype))
        return constrain_tokens(self.norm_after(self.mlp(states_BSD)), "activation_embed")


class Shared(nnx.Module):
    """The projections of modulation that a run's blocks have in common, where they have some."""

    def __init__(
        self,
        config: TransformerConfig,
        block: BlockConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make one projection for each of the block's sequences, or none."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        project = functools.partial(
            Modulation,
            config.embedding_width,
            vectors_of(block),
            config.width,
            bias=block.modulation_bias,
            **make,
        )
        shares = block.modulation in ("table", "shared")
        self.sample = project() if shares else None
        self.text = project() if shares and block.kind == "joint" else None


class Head(nnx.Module):
    """The last norm, modulated, and the projection of tokens to patches."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts; the projection is zero at first."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        head, count = config.head, 2 if config.head.shifts else 1
        self.norm = make_norm(head.norm, config.width, dtype)
        own, bias = head.modulation == "own", head.modulation_bias
        width, inputs = config.width, config.embedding_width
        self.modulation = Modulation(inputs, count, width, bias=bias, **make) if own else None
        self.table = None if own else Table(count, width, rngs=rngs, dtype=dtype)
        outputs = {"conv": math.prod(config.patch) * config.outputs}
        self.out = Dense(config.width, outputs, bias=head.bias, std=0.0, **make)

    @scoped
    def __call__(self, x_BTD: jax.Array, embedding_BE: jax.Array) -> jax.Array:
        """Tokens [B, T, D] and the embedding -> patches [B, T, places * C]."""
        if self.modulation is not None:
            vectors_BnD = self.modulation(jax.nn.silu(embedding_BE))
        else:
            assert self.table is not None, "a head has a projection or a table"
            vectors_BnD = self.table(embedding_BE[:, None])
        *shift, scale = (vectors_BnD[:, i : i + 1] for i in range(vectors_BnD.shape[1]))
        x_BTD = self.norm(x_BTD) * (1 + scale.astype(x_BTD.dtype))
        if shift:
            x_BTD = x_BTD + shift[0].astype(x_BTD.dtype)
        return self.out(x_BTD)
