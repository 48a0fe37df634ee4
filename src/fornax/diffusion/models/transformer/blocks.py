"""The three kinds of blocks of a transformer that denoises.

Legend: B batch, T tokens, S tokens of text, D width, E width of the embedding, n vectors.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.diffusion.models.parts import (
    MLP,
    Conv,
    Dense,
    GatedMLP,
    LayerNorm,
    Make,
    RMSNorm,
    constrain_tokens,
)
from fornax.diffusion.models.transformer.attention import (
    Attention,
    Rope,
    Shape,
    attend,
    make_norm,
)
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    CrossConfig,
    MLPConfig,
    NormConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.embedder import Embedder, Features, Modulation, Table
from fornax.kernels import checkpoint_name
from fornax.models.scope import scoped

__all__ = [
    "Clean",
    "Inputs",
    "JointBlock",
    "ParallelBlock",
    "SequentialBlock",
    "first_input",
    "vectors_ahead",
    "vectors_of",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Clean:
    """What modulates the tokens without noise, as `Inputs` has it of the others."""

    embedding_BE: jax.Array
    """Of time 0."""
    tokens_T: jax.Array
    """bool: which tokens of the sample, or of all, they are."""
    shared_BnD: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the blocks of a run share beside their tokens."""

    embedding_BE: jax.Array | None = None
    """What modulations project, activated."""
    features: Features | None = None
    """What blocks with embedders of their own embed."""
    shared_BnD: jax.Array | None = None
    """Vectors of modulation that all blocks share, of the sample or of all tokens; or those of a
    block with its own, where they were made ahead."""
    shared_text_BnD: jax.Array | None = None
    """Those of the text, in joint blocks."""
    mask_BT: jax.Array | None = None
    """Which of the tokens are seen; in joint blocks, of text and sample."""
    rope: Rope | None = None
    rope_text: Rope | None = None
    states_BSD: jax.Array | None = None
    """Of the text, for attention across."""
    states_mask_BS: jax.Array | None = None
    images_BSD: jax.Array | None = None
    """States of an image, likewise."""
    clean: Clean | None = None
    """Of tokens without noise; None where there are none."""


def vectors_of(block: BlockConfig) -> int:
    """How many vectors modulate a token of a block; of a joint block, one of the sample."""
    branches = 1 if block.kind == "parallel" else 2 + block.second_attention
    return branches * (1 + block.scales + block.shifts)


def _shape(config: TransformerConfig, block: BlockConfig) -> Shape:
    return Shape(
        width=config.width,
        states=config.width,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        qk_norm=block.qk_norm,
        across_heads=block.across_heads,
        bias=block.bias,
        out_bias=block.out_bias,
    )


def _cross_shape(config: TransformerConfig, cross: CrossConfig) -> Shape:
    return Shape(
        width=config.width,
        states=config.text_width,
        num_heads=cross.num_heads,
        head_dim=cross.head_dim,
        qk_norm=cross.qk_norm,
        across_heads=cross.across_heads,
        bias=cross.bias,
        out_bias=cross.out_bias,
        images=cross.images,
    )


class _Vectors(nnx.Module):
    """Where the vectors of a block's modulation come from."""

    def __init__(
        self,
        config: TransformerConfig,
        block: BlockConfig,
        count: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        width, inputs = config.width, config.embedding_width
        self.count, self.source = count, block.modulation
        own, table = block.modulation == "own", block.modulation == "table"
        bias = block.modulation_bias
        self.embedder = Embedder(config.embedder, inputs, **make) if block.own_embedder else None
        self.projection = Modulation(inputs, count, width, bias=bias, **make) if own else None
        self.table = Table(count, width, rngs=rngs, dtype=dtype) if table else None

    @scoped
    def __call__(
        self, inputs: Inputs, shared_BnD: jax.Array | None, dtype: DTypeLike
    ) -> list[jax.Array] | None:
        """The vectors, each [B, 1, D], or [B, T, D] where tokens without noise have their own; None
        where nothing modulates."""
        if self.source == "none":
            return None
        vectors = self._of(inputs, shared_BnD, dtype)
        if inputs.clean is None:
            return vectors
        own = replace(inputs, embedding_BE=inputs.clean.embedding_BE)
        clean_T1 = inputs.clean.tokens_T[:, None]
        return [
            jnp.where(clean_T1, clean, noisy)
            for clean, noisy in zip(
                self._of(own, inputs.clean.shared_BnD, dtype), vectors, strict=True
            )
        ]

    def _of(
        self, inputs: Inputs, shared_BnD: jax.Array | None, dtype: DTypeLike
    ) -> list[jax.Array]:
        vectors_BnD = shared_BnD
        if self.projection is not None and vectors_BnD is None:
            vectors_BnD = self.projection(self._embedding(inputs))
        assert vectors_BnD is not None, "a run's shared vectors were not made"
        if self.table is not None:
            vectors_BnD = self.table(vectors_BnD)
        return [vectors_BnD[:, i : i + 1].astype(dtype) for i in range(self.count)]

    def _embedding(self, inputs: Inputs) -> jax.Array:
        embedding_BE = inputs.embedding_BE
        if self.embedder is not None and inputs.features is not None:
            embedding_BE = jax.nn.silu(self.embedder(inputs.features))
        assert embedding_BE is not None, "a block with modulation of its own has an embedding"
        return embedding_BE

    @scoped
    def ahead(self, inputs: Inputs) -> jax.Array | None:
        """Of a stack of L blocks with modulations of their own, the vectors [L, B, n, D] of all, if
        their weights are read faster at once than in the loop over blocks; else None."""
        given, embedding_BE = inputs.features, inputs.embedding_BE
        rows = 0 if embedding_BE is None else embedding_BE.shape[0]
        ready = inputs.clean is None and embedding_BE is not None
        if self.projection is None or not ready or not self.projection.reads_layers(rows):
            return None
        if self.embedder is None or given is None:
            return self.projection.of_layers(self._embedding(inputs)[None])
        graphdef, stacked = nnx.split(self.embedder)
        embedding_LBE = jax.lax.map(
            lambda state: jax.nn.silu(nnx.merge(graphdef, state)(given)), stacked
        )
        return self.projection.of_layers(embedding_LBE)


class _Branch:
    """The modulation of one branch: before it, and of what it gives."""

    def __init__(self, block: BlockConfig, vectors: list[jax.Array] | None, index: int):
        size = 1 + block.scales + block.shifts
        mine = None if vectors is None else vectors[index * size : (index + 1) * size]
        self.mine, self.block = mine, block

    def into(self, x_BTD: jax.Array) -> jax.Array:
        """x (1 + scale) + shift, rounded once; gradients of vectors are summed in float32."""
        if self.mine is None or not self.block.scales:
            return x_BTD
        *shift, scale, _ = (_wide(vector) for vector in self.mine)
        y_BTD = _wide(x_BTD) * (1 + scale)
        return (y_BTD + shift[0] if shift else y_BTD).astype(x_BTD.dtype)

    def out(self, x_BTD: jax.Array) -> jax.Array:
        """x times the gate, whose gradient sums over tokens in float32."""
        if self.mine is None:
            return x_BTD
        gate = _wide(self.mine[-1])
        gate = jnp.tanh(gate) if self.block.gate == "tanh" else gate
        return (_wide(x_BTD) * gate).astype(x_BTD.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class ConvMLP(nnx.Module):
    """down(silu(gate') * up'), where ' is an activation and a convolution of each channel (Sana,
    Xie et al. 2024)."""

    def __init__(
        self,
        width: int,
        mlp: MLPConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the projections and convolutions."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.up = Dense(width, mlp.hidden, bias=mlp.bias, **make)
        self.gate = Dense(width, mlp.hidden, bias=mlp.bias, **make)
        depthwise = functools.partial(Conv, mlp.hidden, mlp.hidden, 3, groups=mlp.hidden)
        self.up_convolution = depthwise(axes=(None, "mlp"), **make)
        self.gate_convolution = depthwise(axes=(None, "mlp"), **make)
        self.down = Dense({"mlp": mlp.hidden}, {"embed": width}, bias=mlp.down_bias, **make)

    @scoped
    def __call__(self, x_BTD: jax.Array, grid: tuple[int, ...]) -> jax.Array:
        """Apply to the tokens of a grid of rows and columns -> y [B, T, D]."""
        B, T = x_BTD.shape[:2]

        def image(h_BTF: jax.Array) -> jax.Array:
            return jax.nn.silu(h_BTF).reshape(B, *grid, -1)

        up = self.up_convolution(image(self.up(x_BTD)))
        gate = self.gate_convolution(image(self.gate(x_BTD)))
        return self.down((up * jax.nn.silu(gate)).reshape(B, T, -1))


def _mlp(width: int, mlp: MLPConfig, **make: object) -> MLP | GatedMLP | ConvMLP:
    if mlp.kind == "convolution":
        return ConvMLP(width, mlp, **make)  # pyrefly: ignore[bad-argument-type]
    kind = GatedMLP if mlp.kind == "gated" else MLP
    return kind(
        width,
        mlp.hidden,
        width,
        activation=mlp.activation,
        bias=mlp.bias,
        down_bias=mlp.down_bias,
        **make,  # pyrefly: ignore[bad-argument-type]
    )


class SequentialBlock(nnx.Module):
    """Attention among the tokens, attention to the text if there is some, then the MLP."""

    def __init__(
        self,
        config: TransformerConfig,
        block: BlockConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts that the block's config names."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        width = config.width
        self.block = block
        self.vectors = _Vectors(config, block, vectors_of(block), **make)
        self.norm = make_norm(block.norm, width, dtype)
        self.attention = Attention(_shape(config, block), **make)
        self.post_norm = _maybe_norm(block.post_norm, width, dtype)
        cross = block.cross
        self.cross_norm = _maybe_norm(None if cross is None else cross.norm, width, dtype)
        self.cross = None if cross is None else Attention(_cross_shape(config, cross), **make)
        self.mlp_norm = make_norm(block.mlp_norm, width, dtype)
        self.mlp = _mlp(width, block.mlp, **make)
        self.post_mlp_norm = _maybe_norm(block.post_norm, width, dtype)

    @scoped
    def __call__(self, x_BTD: jax.Array, inputs: Inputs, grid: tuple[int, ...]) -> jax.Array:
        """Run the block -> [B, T, D]; `grid` is of the tokens, where they are of the sample."""
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        vectors = self.vectors(inputs, inputs.shared_BnD, x_BTD.dtype)
        first, second = (_Branch(self.block, vectors, index) for index in range(2))
        y_BTD = self.attention(
            first.into(self.norm(x_BTD)),
            mask_BS=inputs.mask_BT,
            rope=inputs.rope,
            linear=self.block.attention == "linear",
        )
        x_BTD = x_BTD + first.out(_maybe(self.post_norm, y_BTD))
        if self.cross is not None:
            y_BTD = self.cross(
                _maybe(self.cross_norm, x_BTD),
                inputs.states_BSD,
                mask_BS=inputs.states_mask_BS,
                images_BSD=inputs.images_BSD,
            )
            x_BTD = x_BTD + y_BTD
        y_BTD = second.into(self.mlp_norm(x_BTD))
        y_BTD = self.mlp(y_BTD, grid) if isinstance(self.mlp, ConvMLP) else self.mlp(y_BTD)
        x_BTD = x_BTD + second.out(_maybe(self.post_mlp_norm, y_BTD))
        return constrain_tokens(x_BTD, "activation_embed")


class Stream(nnx.Module):
    """The weights of a joint block for one of its two sequences."""

    def __init__(
        self,
        config: TransformerConfig,
        block: BlockConfig,
        *,
        text: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts; those of text that is not wanted any more are fewer."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        width = config.width
        ends, twice = text and block.text_ends, block.second_attention and not text
        count = (2 if block.shifts else 1) if ends else (9 if twice else 6)
        if not block.shifts and not ends:
            count = count // 3 * 2
        self.block = block
        self.vectors = _Vectors(config, block, count, **make)
        self.norm = make_norm(block.norm, width, dtype)
        self.attention = Attention(_shape(config, block), wanted=not ends, **make)
        self.second = Attention(_shape(config, block), **make) if twice else None
        self.mlp_norm = None if ends else make_norm(block.mlp_norm, width, dtype)
        self.mlp = None if ends else _mlp(width, block.mlp, **make)

    def modulation(
        self, inputs: Inputs, shared_BnD: jax.Array | None, dtype: DTypeLike
    ) -> list[jax.Array] | None:
        """The vectors, with a gate of none where the text ends."""
        vectors = self.vectors(inputs, shared_BnD, dtype)
        if self.mlp is None and vectors is not None:
            vectors = [*vectors, vectors[0]]  # the gate of a branch that is not wanted
        return vectors

    def finish(
        self, x_BTD: jax.Array, o_BTNH: jax.Array, vectors: list[jax.Array] | None
    ) -> jax.Array:
        """What attention gave, and the MLP, added to x."""
        if self.mlp is None or self.mlp_norm is None:
            return x_BTD
        first, second = (_Branch(self.block, vectors, index) for index in range(2))
        before_BTD = x_BTD
        x_BTD = x_BTD + first.out(self.attention.project(o_BTNH))
        if self.second is not None:
            third = _Branch(self.block, vectors, 2)
            x_BTD = x_BTD + third.out(self.second(third.into(self.norm(before_BTD))))
        y_BTD = self.mlp(second.into(self.mlp_norm(x_BTD)))  # pyrefly: ignore[missing-argument]
        x_BTD = x_BTD + second.out(y_BTD)
        return constrain_tokens(x_BTD, "activation_embed")


class JointBlock(nnx.Module):
    """Text and sample, each with weights of its own, attend as one sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        block: BlockConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make both streams."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.sample = Stream(config, block, text=False, **make)
        self.text = Stream(config, block, text=True, **make)

    @scoped
    def __call__(
        self, x_BTD: jax.Array, text_BSD: jax.Array, inputs: Inputs
    ) -> tuple[jax.Array, jax.Array]:
        """Run the block -> the sample's tokens [B, T, D] and the text's [B, S, D]."""
        found = []
        for stream, tokens, rope, shared in (
            (self.text, text_BSD, inputs.rope_text, inputs.shared_text_BnD),
            (self.sample, x_BTD, inputs.rope, inputs.shared_BnD),
        ):
            tokens = checkpoint_name(tokens, "layer_input")
            own = replace(inputs, clean=None) if stream is self.text else inputs
            vectors = stream.modulation(own, shared, tokens.dtype)
            into = _Branch(stream.block, vectors, 0).into(stream.norm(tokens))
            found.append((vectors, stream.attention.heads(into, rope=rope)))
        (text_vectors, text_heads), (vectors, heads) = found
        q, k, v = (jnp.concatenate(pair, 1) for pair in zip(text_heads, heads, strict=True))
        o_BTNH = attend(q, k, v, inputs.mask_BT)
        S = text_BSD.shape[1]
        text_BSD = self.text.finish(text_BSD, o_BTNH[:, :S], text_vectors)
        return self.sample.finish(x_BTD, o_BTNH[:, S:], vectors), text_BSD


class ParallelBlock(nnx.Module):
    """Attention and MLP of the same normed tokens, added together."""

    def __init__(
        self,
        config: TransformerConfig,
        block: BlockConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.block = block
        self.vectors = _Vectors(config, block, vectors_of(block), **make)
        self.norm = make_norm(block.norm, config.width, dtype)
        self.attention = Attention(_shape(config, block), **make)
        self.mlp = _mlp(config.width, block.mlp, **make)

    @scoped
    def __call__(self, x_BTD: jax.Array, inputs: Inputs) -> jax.Array:
        """Run the block -> [B, T, D]."""
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        vectors = self.vectors(inputs, inputs.shared_BnD, x_BTD.dtype)
        branch = _Branch(self.block, vectors, 0)
        into_BTD = branch.into(self.norm(x_BTD))
        y_BTD = self.attention(
            into_BTD,
            mask_BS=inputs.mask_BT,
            rope=inputs.rope,
            linear=self.block.attention == "linear",
        )
        y_BTD = y_BTD + self.mlp(into_BTD)  # pyrefly: ignore[missing-argument]
        x_BTD = x_BTD + branch.out(y_BTD)
        return constrain_tokens(x_BTD, "activation_embed")


def first_input(
    block: SequentialBlock | JointBlock | ParallelBlock, x_BTD: jax.Array, inputs: Inputs
) -> jax.Array:
    """What the attention of a block takes of the sample's tokens: normed and modulated [B, T, D].

    Of the first block it is the signal of TeaCache (Liu et al. 2024).
    """
    part = block.sample if isinstance(block, JointBlock) else block
    vectors = part.vectors(inputs, inputs.shared_BnD, x_BTD.dtype)
    return _Branch(part.block, vectors, 0).into(part.norm(x_BTD))


def vectors_ahead(
    stack: SequentialBlock | JointBlock | ParallelBlock, inputs: Inputs
) -> dict[str, jax.Array] | None:
    """The fields of `Inputs` [L, ...] that a stack's blocks take from vectors made ahead, or None
    (see `_Vectors.ahead`)."""
    if isinstance(stack, JointBlock):
        parts = {"shared_BnD": stack.sample, "shared_text_BnD": stack.text}
    else:
        parts = {"shared_BnD": stack}
    found = {name: part.vectors.ahead(inputs) for name, part in parts.items()}
    made = {name: vectors for name, vectors in found.items() if vectors is not None}
    return made if len(made) == len(parts) else None


def _maybe_norm(
    norm: NormConfig | None, width: int, dtype: DTypeLike
) -> LayerNorm | RMSNorm | None:
    return None if norm is None else make_norm(norm, width, dtype)


def _maybe(norm: LayerNorm | RMSNorm | None, x_BTD: jax.Array) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)
