"""CLIP's image encoder: the states that some video models attend to.

Legend: B batch, H height, W width, S patches and the class token, D model width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import Conv, Embedding, LayerNorm
from fornax.diffusion.models.text.clip import CLIPLayer, CLIPVisionConfig
from fornax.diffusion.models.text.stack import run_stack
from fornax.mesh import constrain
from fornax.models import stack_layers
from fornax.models.projection import draw
from fornax.models.scope import scoped

__all__ = ["CLIPVisionEncoder"]


class CLIPVisionEncoder(nnx.Module):
    """CLIP's image encoder (Radford et al. 2021), as transformers has it.

    Attributes:
      patch: the patches' convolution.
      class_token: [D].
      positions: table of learned positions, the class token's first.
      first_norm: before all layers.
      layers: all layers, their parameters with a leading "layers" axis.
      final_norm: of the class token behind them, which nothing here reads.
    """

    def __init__(
        self,
        config: CLIPVisionConfig,
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
        make = {"dtype": dtype, "compute_dtype": compute}
        self.config, width, side = config, config.hidden_size, config.patch_size
        self.patch = Conv(
            3,
            width,
            side,
            stride=side,
            padding=0,
            bias=False,
            axes=(None, "embed"),
            rngs=rngs,
            **make,
        )
        self.class_token = nnx.Param(draw(rngs.params(), (width,), dtype, 0.02), axes=("norm",))
        places = (config.image_size // side) ** 2 + 1
        self.positions = Embedding(places, width, rngs=rngs, **make)
        self.first_norm = LayerNorm(width, eps=config.norm_eps, dtype=dtype)
        self.layers = stack_layers(
            lambda own: CLIPLayer(config, causal=False, rngs=own, **make), config.num_layers, rngs
        )
        self.final_norm = LayerNorm(width, eps=config.norm_eps, dtype=dtype)

    @scoped
    def __call__(self, images_BHWC: jax.Array, *, skip: int = 0) -> jax.Array:
        """The states of images, without the final norm.

        Args:
          images_BHWC: normalised, of `image_size`.
          skip: how many of the last layers the states leave out.

        Returns:
          [B, S, D], the class token first.

        Raises:
          ConfigError: images of another size.
        """
        config, side = self.config, self.config.image_size
        if images_BHWC.shape[1:] != (side, side, 3):
            raise ConfigError(
                f"images of shape {images_BHWC.shape} do not fit an encoder of [B, {side}, {side}, "
                "3]; resize and crop them"
            )
        x_BSD = self.patch(images_BHWC)
        x_BSD = x_BSD.reshape(x_BSD.shape[0], -1, config.hidden_size)
        first_D = self.class_token[...].astype(x_BSD.dtype)
        first_BSD = jnp.broadcast_to(first_D, (x_BSD.shape[0], 1, config.hidden_size))
        x_BSD = jnp.concatenate([first_BSD, x_BSD], 1)
        x_BSD = self.first_norm(x_BSD + self.positions(jnp.arange(x_BSD.shape[1])))
        x_BSD = constrain(x_BSD, ("batch", "length", "activation_embed"))
        return run_stack(
            self.layers,
            x_BSD,
            lambda layer, x_BSD: layer(x_BSD, None),
            keep=config.num_layers - skip,
        )[1]
