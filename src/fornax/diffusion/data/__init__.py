"""Images and videos with captions to train diffusion models on, from fonts and from files."""

from fornax.diffusion.data.cached import Cache, CachedExamples, Latents
from fornax.diffusion.data.config import EncodedConfig, ImageData, ImagesConfig, LettersConfig
from fornax.diffusion.data.examples import Examples, open_examples
from fornax.diffusion.data.prior import WithPrior
from fornax.diffusion.data.stream import BucketStream, Picks

__all__ = [
    "BucketStream",
    "Cache",
    "CachedExamples",
    "EncodedConfig",
    "Examples",
    "ImageData",
    "ImagesConfig",
    "Latents",
    "LettersConfig",
    "Picks",
    "WithPrior",
    "open_examples",
]
