"""What a U-Net's residual blocks take in: one vector of the time, classes, sizes and pooled text.

Legend: B batch, E width of the embedding, D width of pooled text, N numbers.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.parts import (
    ACTIVATIONS,
    MLP,
    Activation,
    Dense,
    Embedding,
    Make,
    timestep_embedding,
)
from fornax.diffusion.models.unet.config import UNetConfig
from fornax.models.scope import scoped

__all__ = ["TimeEmbedding"]


class TimeEmbedding(nnx.Module):
    """The time's sines and cosines through an MLP, with the classes' and sizes' embeddings added.

    Attributes:
      guidance: projects the embedding of the guidance, or None.
      time: the MLP of the time.
      classes: the table, MLP or projection of the classes, or None.
      sizes: the MLP of pooled text and sizes, or None.
    """

    def __init__(
        self,
        config: UNetConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        inputs, width = config.channels[0], config.time_dim
        self.config, self.compute_dtype = config, compute_dtype
        self.time = _mlp(inputs, width, config.activation, make)
        guided = config.time_condition_dim
        self.guidance = None if guided is None else Dense(guided, inputs, bias=False, **make)
        self.classes = _classes(config, make)
        sized = config.size_dim is not None
        self.sizes = _mlp(config.projection_dim, width, "silu", make) if sized else None

    @scoped
    def __call__(self, time_B: jax.Array, condition: Condition) -> jax.Array:
        """Embed a time float32 [B] and the condition -> [B, E] in the compute dtype."""
        config = self.config
        waves_BC = self._waves(time_B)
        if self.guidance is not None:
            waves_BC = waves_BC + self.guidance(self._guidance(_given(condition.guidance_B)))
        sum_BE = self.time(waves_BC)
        if config.time_post_activation is not None:
            sum_BE = ACTIVATIONS[config.time_post_activation](sum_BE)
        if config.class_embedding != "none":
            classes_BE = self._classes(_given(condition.classes_B))
            if config.class_concat:
                sum_BE = jnp.concatenate([sum_BE, classes_BE], axis=-1)
            else:
                sum_BE = sum_BE + classes_BE
        if self.sizes is not None:
            both = self._sizes(_given(condition.pooled_BD), _given(condition.sizes_BN))
            sum_BE = sum_BE + self.sizes(both)
        if config.time_activation is not None:
            sum_BE = ACTIVATIONS[config.time_activation](sum_BE)
        return sum_BE

    def _waves(self, time_B: jax.Array, width: int | None = None) -> jax.Array:
        """Sines and cosines, computed in float32 and cast."""
        config = self.config
        waves = timestep_embedding(
            time_B,
            config.channels[0] if width is None else width,
            cosines_first=config.flip_sin_to_cos,
            frequency_shift=config.freq_shift,
        )
        return waves.astype(self.compute_dtype)

    def _guidance(self, guidance_B: jax.Array) -> jax.Array:
        """As diffusers' pipelines embed it: less one, in thousandths, sines first."""
        width = self.config.time_condition_dim or 0
        scaled_B = 1000.0 * (guidance_B - 1.0)
        waves = timestep_embedding(scaled_B, width, cosines_first=False, frequency_shift=1.0)
        return waves.astype(self.compute_dtype)

    def _classes(self, classes_B: jax.Array) -> jax.Array:
        if self.classes is None:  # it is the embedding itself, [B, E]
            return classes_B.astype(self.compute_dtype)
        if self.config.class_embedding == "timestep":
            classes_B = self._waves(classes_B)
        return self.classes(classes_B)

    def _sizes(self, pooled_BD: jax.Array, sizes_BN: jax.Array) -> jax.Array:
        B, N = sizes_BN.shape
        waves = self._waves(sizes_BN.reshape(B * N), self.config.size_dim).reshape(B, -1)
        return jnp.concatenate([pooled_BD.astype(self.compute_dtype), waves], axis=-1)


def _given(value: jax.Array | None) -> jax.Array:
    assert value is not None, "the network asks for what its config needs"
    return value


def _classes(config: UNetConfig, make: Make) -> Embedding | MLP | Dense | None:
    """What embeds the classes, if it has parameters."""
    width, kind = config.time_dim, config.class_embedding
    if kind == "table":
        return Embedding(config.classes or 0, width, **make)
    if kind == "timestep":
        return _mlp(config.channels[0], width, config.activation, make)
    if kind == "projection":
        return _mlp(config.projection_dim, width, "silu", make)
    if kind == "linear":
        return Dense(config.projection_dim or 0, {"embed": width}, **make)
    return None


def _mlp(inputs: int | None, width: int, activation: Activation, make: Make) -> MLP:
    return MLP(inputs or 0, width, width, activation=activation, **make)
