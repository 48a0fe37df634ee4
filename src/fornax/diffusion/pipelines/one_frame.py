"""An autoencoder of videos for images, which are videos of one frame.

Legend: B images, H height, W width, C channels.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from fornax.diffusion.models.autoencoders import Gaussian, Tiling, WanAutoencoder

__all__ = ["OneFrame", "of_images"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneFrameConfig:
    """What pipelines ask of an autoencoder of images."""

    latent_channels: int
    factor: int
    patch: tuple[int, int] = (1, 1)


def of_images(autoencoder: Any) -> Any:
    """The autoencoder, where it is of videos as one of images."""
    return OneFrame(autoencoder) if isinstance(autoencoder, WanAutoencoder) else autoencoder


class OneFrame(nnx.Module):
    """An autoencoder of images, as the others: `latents` and `images`."""

    def __init__(self, video: WanAutoencoder):
        """Take the autoencoder of videos."""
        self.video = video
        self.config = OneFrameConfig(
            latent_channels=video.config.latent_channels, factor=video.config.factor
        )

    def encode(self, images_BHWC: jax.Array, *, tiling: Tiling | None = None) -> Gaussian:
        """The distribution of z; see `WanAutoencoder.encode`."""
        found = self.video.encode(images_BHWC[:, None], tiling=tiling)
        return Gaussian(found.mean_BHWC[:, 0], found.logvar_BHWC[:, 0])

    def scaled(self, z_BHWC: jax.Array) -> jax.Array:
        """What a denoiser is given of z, float32."""
        return self.video.scaled(z_BHWC)

    def latents(self, images_BHWC: jax.Array) -> jax.Array:
        """Images in -1..1 to float32 latents."""
        return self.video.latents(images_BHWC[:, None])[:, 0]

    def images(self, latents_BHWC: jax.Array) -> jax.Array:
        """The inverse."""
        return self.video.videos(latents_BHWC[:, None])[:, 0]
