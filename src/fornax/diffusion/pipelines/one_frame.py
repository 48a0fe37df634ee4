"""An autoencoder of videos for images, which are videos of one frame.

Legend: B images, H height, W width, C channels.
"""

import dataclasses

import jax
from flax import nnx

from fornax.diffusion.models.autoencoders import WanAutoencoder

__all__ = ["OneFrame"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneFrameConfig:
    """What pipelines ask of an autoencoder of images."""

    latent_channels: int
    factor: int
    patch: tuple[int, int] = (1, 1)


class OneFrame(nnx.Module):
    """An autoencoder of images, as the others: `latents` and `images`."""

    def __init__(self, video: WanAutoencoder):
        """Take the autoencoder of videos."""
        self.video = video
        self.config = OneFrameConfig(
            latent_channels=video.config.latent_channels, factor=video.config.factor
        )

    def latents(self, images_BHWC: jax.Array) -> jax.Array:
        """Images in -1..1 to float32 latents."""
        return self.video.latents(images_BHWC[:, None])[:, 0]

    def images(self, latents_BHWC: jax.Array) -> jax.Array:
        """The inverse."""
        return self.video.videos(latents_BHWC[:, None])[:, 0]
