"""`fornax diffusion calibrate`: what caches of steps need to know of a model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.diffusion.pipelines import ImageRequest, Pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure how a transformer's blocks change from step to step, for --cache of sample and serve.

    Draws once without a cache, keeps the numbers beside the model in step_cache.json, then draws
    with TeaCache and MagCache at several thresholds and prints what each left out and its error.
    Give the steps, guidance and size that you draw with, and a few prompts.

    examples:
      fornax diffusion calibrate runs/letters --prompt "bold serif R" "italic sans G" --steps 20
      fornax diffusion calibrate wan-i2v/ --prompt "it flies away" --image bird.jpg --frames 33
      fornax diffusion sample runs/letters --prompt "bold serif A" --steps 20 --cache teacache
    """

    model: Annotated[Positional[Path], arg(metavar="DIR")]
    """Folder with model_index.json, or a run directory."""
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    """What to draw, one or several (default: without a prompt)."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Of the sampler (default: the model's)."""
    guidance: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Scale of guidance, 1 for none (default: the model's)."""
    sampler: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """euler, dpm++2m, unipc and others (default: the model's)."""
    size: Annotated[str | None, arg(metavar="WxH", help_behavior_hint="")] = None
    """Width and height in pixels (default: the model's)."""
    frames: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Of a video (default: the model's)."""
    image: Annotated[tuple[Path, ...], arg(metavar="FILE ...", help_behavior_hint="")] = ()
    """To draw after, or one that the video begins with."""
    seed: int = 0
    """Of the noise."""
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint=""),
    ] = None
    """Of the weights (default: as they are stored)."""


def run(arguments: Arguments) -> int:
    """Measure, keep, print."""
    from fornax.diffusion.pipelines import join, load_pipeline, plan
    from fornax.diffusion.pipelines.calibration import CALIBRATION, calibrate, check_cacheable
    from fornax.mesh import initialize, parse_dtype

    initialize()
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    pipeline = load_pipeline(arguments.model, dtype=dtype)
    check_cacheable(pipeline)
    requests = _requests(arguments, pipeline)
    found, measured = calibrate(pipeline, join([plan(pipeline, each) for each in requests]))
    path = arguments.model / CALIBRATION
    found.save(path)
    print(path)  # noqa: T201
    for each in measured:
        print(each, flush=True)  # noqa: T201
    return 0


def _requests(arguments: Arguments, pipeline: "Pipeline") -> "list[ImageRequest]":
    """One of each prompt."""
    from fornax.diffusion.pipelines import ImageRequest, parse_size, shown
    from fornax.diffusion.pipelines.pictures import open_picture

    size = pipeline.size if arguments.size is None else parse_size(arguments.size)
    pictures = [open_picture(path, f"--image {path}") for path in arguments.image]
    if pictures and not pipeline.begins and pipeline.references is None:
        raise ConfigError(
            f"--image {arguments.image[0]}: {pipeline.name} neither draws after an image nor "
            "begins a video with one, and a calibration draws from noise; leave it out"
        )
    return [
        ImageRequest(
            prompt=prompt,
            size=size,
            frames=arguments.frames,
            steps=arguments.steps,
            guidance=arguments.guidance,
            sampler=arguments.sampler,
            seed=arguments.seed,
            **shown(pipeline, pictures, size, strength=None, masked=False),
        )
        for prompt in arguments.prompt or (None,)
    ]
