"""What a transformer's blocks are modulated by: the embedding of time, class, text and sizes.

Legend: B batch, E width of the embedding, C channels of sines and cosines, D width, n numbers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.parts import MLP, Dense, Embedding, Make, timestep_embedding
from fornax.diffusion.models.transformer.config import EmbedderConfig
from fornax.mesh import constrain
from fornax.models.scope import scoped

__all__ = ["Embedder", "Features", "Modulation", "Table", "TextEmbedder", "features"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Features:
    """What an embedder takes, before any weights."""

    time_BC: jax.Array
    guidance_BC: jax.Array | None
    sizes_BnC: jax.Array | None
    classes_B: jax.Array | None
    pooled_BD: jax.Array | None


def features(time_B: jax.Array, condition: Condition, config: EmbedderConfig) -> Features:
    """Sines and cosines of the numbers, float32, with what else is embedded."""

    def waves(numbers: jax.Array) -> jax.Array:
        return timestep_embedding(numbers, config.channels, frequency_shift=config.frequency_shift)

    time_B = config.time_offset + config.time_scale * time_B.astype(jnp.float32)
    guidance_BC = sizes_BnC = None
    if config.guidance_scale is not None and condition.guidance_B is not None:
        guidance_BC = waves(config.guidance_scale * condition.guidance_B.astype(jnp.float32))
    if config.sizes and condition.sizes_BN is not None:
        sizes_BN = condition.sizes_BN
        sizes_BnC = waves(sizes_BN.reshape(-1)).reshape(*sizes_BN.shape, -1)
    return Features(
        time_BC=waves(time_B),
        guidance_BC=guidance_BC,
        sizes_BnC=sizes_BnC,
        classes_B=condition.classes_B if config.classes is not None else None,
        pooled_BD=condition.pooled_BD if config.pooled is not None else None,
    )


class Embedder(nnx.Module):
    """The sum of the embeddings, in float32: products of times in bfloat16 lose steps."""

    def __init__(
        self,
        config: EmbedderConfig,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parts that the config names; `width` is E."""
        del compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=jnp.float32)
        hidden = width if config.hidden is None else config.hidden

        def mlp(inputs: int, outputs: int, inner: int) -> MLP:
            return MLP(inputs, inner, outputs, activation="silu", bias=config.bias, **make)

        self.time = mlp(config.channels, width, hidden)
        guided = config.guidance_scale is not None
        self.guidance = mlp(config.channels, width, hidden) if guided else None
        part = width // 3
        self.resolution = mlp(config.channels, part, part) if config.sizes else None
        self.aspect = mlp(config.channels, part, part) if config.sizes else None
        rows = 0 if config.classes is None else config.classes + 1
        self.classes = Embedding(rows, width, **make) if rows else None
        self.pooled = None if config.pooled is None else mlp(config.pooled, width, width)

    @scoped
    def __call__(self, given: Features) -> jax.Array:
        """The embedding, float32 [B, E]."""
        embedding_BE = self.time(given.time_BC)
        if self.guidance is not None and given.guidance_BC is not None:
            embedding_BE += self.guidance(given.guidance_BC)
        if self.resolution is not None and self.aspect is not None and given.sizes_BnC is not None:
            sides = self.resolution(given.sizes_BnC[:, :2]), self.aspect(given.sizes_BnC[:, 2:])
            parts = [side.reshape(side.shape[0], -1) for side in sides]
            embedding_BE += jnp.concatenate(parts, axis=1)
        if self.classes is not None and given.classes_B is not None:
            embedding_BE += self.classes(given.classes_B)
        if self.pooled is not None and given.pooled_BD is not None:
            embedding_BE += self.pooled(given.pooled_BD)
        return constrain(embedding_BE, ("batch", None))


class TextEmbedder(Embedder):
    """The embedding of the time and of the mean of a text's states (HunyuanVideo, Kong et al.
    2024)."""

    def __init__(
        self,
        text_width: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make it, of states `text_width` wide; `width` is E."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.config = EmbedderConfig(pooled=text_width)
        super().__init__(self.config, width, **make)

    @scoped
    def of(self, time_B: jax.Array, condition: Condition) -> jax.Array:
        """silu of the embedding, float32 [B, E]; padding is not in the mean."""
        text_BSD, mask_BS = condition.text_BSD, condition.text_mask_BS
        assert text_BSD is not None, "the condition was checked to have text"
        seen_BS1 = None if mask_BS is None else mask_BS[..., None] != 0
        mean_BD = jnp.mean(text_BSD, axis=1, where=seen_BS1)
        given = features(time_B, Condition(pooled_BD=mean_BD), self.config)
        return jax.nn.silu(self(given))


class Modulation(nnx.Module):
    """A projection of the embedding to scales, shifts and gates, at first zero (adaLN-Zero)."""

    def __init__(
        self,
        inputs: int,
        count: int,
        width: int,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make a projection to `count` vectors of a width."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        outputs = {"groups": count, "mlp": width}
        self.linear = Dense(inputs, outputs, bias=bias, std=0.0, **make)

    @scoped
    def __call__(self, embedding_BE: jax.Array) -> jax.Array:
        """The vectors [B, count, D]."""
        # Whole on each device: where XLA chooses, rows of joint blocks meet vectors of others
        # (jax 0.10.2; data, fsdp and tensor of 2 each).
        return constrain(self.linear(embedding_BE), ("batch", None, None))

    def reads_layers(self, rows: int) -> bool:
        """Of a stack of projections: whether `of_layers` reads it in place."""
        if type(self.linear) is not Dense:  # with adapters, say
            return False
        kernel = self.linear.kernel.get_value()
        return kernels.runs_few_rows(rows, self.linear.compute_dtype, kernel)

    @scoped
    def of_layers(self, embedding_LBE: jax.Array) -> jax.Array:
        """Of a stack of projections that are arrays the vectors [L, B, count, D] of all; one
        embedding may be that of all layers."""
        kernel = self.linear.kernel[...]
        x_LBE = embedding_LBE.astype(self.linear.compute_dtype)
        x_LBE = jnp.broadcast_to(x_LBE, (kernel.shape[0], *x_LBE.shape[1:]))
        y = kernels.few_rows_linear(x_LBE, kernel.reshape(*kernel.shape[:2], -1))
        y_LBnD = y.reshape(*y.shape[:2], *kernel.shape[2:])
        graphdef, stacked = nnx.split(self.linear)
        return jax.vmap(lambda state, y: nnx.merge(graphdef, state).add_bias(y))(stacked, y_LBnD)


class Table(nnx.Module):
    """Vectors that are added to those that all blocks share (PixArt, Chen et al. 2023).

    Attributes:
      table: [count, D].
    """

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        """Draw the table of a normal of deviation 1 / sqrt(D)."""
        drawn = jax.random.normal(rngs.params(), (count, width)) * width**-0.5
        self.table = nnx.Param(drawn.astype(dtype), axes=(None, "norm"))

    def __call__(self, shared_BnD: jax.Array) -> jax.Array:
        """The sum [B, count, D]; `shared_BnD` may have one vector for all."""
        return self.table[...].astype(shared_BnD.dtype) + shared_BnD
