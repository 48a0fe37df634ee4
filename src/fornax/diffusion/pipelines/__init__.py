"""Models that draw, loaded into one record, and requests made into what a sampler runs."""

from fornax.diffusion.pipelines.convert import PictureParity, convert_pipeline
from fornax.diffusion.pipelines.load import load_pipeline, with_adapters, with_controls
from fornax.diffusion.pipelines.pipeline import (
    Frames,
    Job,
    Pipeline,
    References,
    Size,
    join,
    parse_size,
)
from fornax.diffusion.pipelines.request import ImageRequest, plan, shown
from fornax.diffusion.pipelines.saving import save_pipeline, with_denoiser

__all__ = [
    "Frames",
    "ImageRequest",
    "Job",
    "PictureParity",
    "Pipeline",
    "References",
    "Size",
    "convert_pipeline",
    "join",
    "load_pipeline",
    "parse_size",
    "plan",
    "save_pipeline",
    "shown",
    "with_adapters",
    "with_controls",
    "with_denoiser",
]
