"""The image encoder of LLaVA (Liu et al. 2023), whose states stand among a prompt's tokens.

Legend: B images, H height, W width, S patches, E width of the language model.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.diffusion.models.parts import MLP, Activation, Make
from fornax.diffusion.models.text.clip import CLIPVisionConfig
from fornax.diffusion.models.text.clip_vision import CLIPVisionEncoder
from fornax.models.scope import scoped

__all__ = ["LlavaVision", "LlavaVisionConfig"]


@dataclass(frozen=True, kw_only=True)
class LlavaVisionConfig:
    """What the encoder is."""

    vision: CLIPVisionConfig
    outputs: int
    """E."""
    activation: Activation = "gelu"
    """Of the projector."""


class LlavaVision(nnx.Module):
    """CLIP's states before its last layer, without the class token, through an MLP.

    Attributes:
      vision: CLIP.
      projector: to the language model's width.
    """

    def __init__(
        self,
        config: LlavaVisionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make all parameters.

        Args:
          config: what the encoder is.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of activations and products; None for that of the parameters.
        """
        compute = dtype if compute_dtype is None else compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute)
        self.config, width = config, config.outputs
        self.vision = CLIPVisionEncoder(config.vision, **make)
        self.projector = MLP(
            config.vision.hidden_size, width, width, activation=config.activation, **make
        )

    @scoped
    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """The states of images, normalised, of CLIP's size [B, S, E]; errors are CLIP's."""
        return self.projector(self.vision(images_BHWC, skip=1)[:, 1:])
