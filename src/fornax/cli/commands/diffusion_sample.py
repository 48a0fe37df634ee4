"""`fornax diffusion sample`: prompts to files of images and videos."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.config import ConfigError
from fornax.config.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from PIL import Image

    from fornax.diffusion.pipelines import ImageRequest, Job, Pipeline, Size
    from fornax.diffusion.pipelines.calibration import CacheName

_PLAIN = {"help_behavior_hint": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Generate images or videos with a diffusers folder or a run of diffusion train.

    An image depends on its prompt, seed and number only. Several are NAME-0.png, NAME-1.png, ...

    examples:
      fornax diffusion sample runs/letters --prompt "bold serif R" --steps 8 --out r.png
      fornax diffusion sample sdxl/ --prompt "a fox" "a hare" --image photo.jpg --strength 0.6
      fornax diffusion sample wan/ --prompt "a fox runs" --frames 17 --fps 16 --out fox.mp4
    """

    model: Annotated[Positional[Path], arg(metavar="DIR")]
    """Folder with model_index.json, or a run directory."""
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    """What to draw, one or several (default: without a prompt)."""
    negative: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """What to avoid."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("image.png")
    """.png, .jpg, .webp; videos .mp4, .webp, .gif, .png."""
    count: int = 1
    """Images of each prompt."""
    seed: int = 0
    """Of the noise."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Of the sampler (default: the model's)."""
    guidance: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """Scale of guidance, 1 for none (default: the model's)."""
    sampler: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """euler, dpm++2m, unipc and others (default: the model's)."""
    size: Annotated[str | None, arg(metavar="WxH", help_behavior_hint="")] = None
    """Width and height in pixels (default: the model's)."""
    frames: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Of a video (default: the model's)."""
    fps: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Frames of a video per second (default: the model's)."""
    image: Annotated[tuple[Path, ...], arg(metavar="FILE ...", help_behavior_hint="")] = ()
    """To draw after; with strength, mask or where it cannot, one to start from."""
    strength: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """Share of the schedule after a start (default: 0.8, or 1 with a mask)."""
    mask: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """White where to draw, black where to keep the picture."""
    control: Annotated[tuple[str, ...], arg(metavar="IMG ...", help_behavior_hint="")] = ()
    """Pictures such as edges, one for each ControlNet, FILE:0.8 at a scale."""
    controlnet: Annotated[tuple[Path, ...], arg(metavar="DIR ...", help_behavior_hint="")] = ()
    """ControlNets to add to those of the model's folder."""
    cache: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """teacache or magcache[:threshold]: leave out blocks that change little."""
    compare: Annotated[bool, NO_DEFAULT] = False
    """Draw without the cache too, and print the difference."""
    lora: Annotated[tuple[str, ...], arg(metavar="FILE", help_behavior_hint="")] = ()
    """Adapters to merge, FILE:0.8 at a scale; EARLY,LATE of two networks."""
    batch: int = 4
    """Images that are drawn at once."""
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        arg(metavar="TYPE", help_behavior_hint=""),
    ] = None
    """float32 or bfloat16, of the weights (default: as they are stored)."""


def run(arguments: Arguments) -> int:
    """Draw; the files' names go to standard output as they are written."""
    from fornax.diffusion.pipelines import load_pipeline, plan, with_adapters, with_controls
    from fornax.diffusion.pipelines.calibration import with_cache
    from fornax.mesh import initialize, parse_dtype

    if arguments.batch < 1 or arguments.count < 1:
        raise ConfigError(
            f"--batch {arguments.batch} --count {arguments.count}: give at least 1 of each"
        )
    paths, cache, pictures = _paths(arguments), _cache(arguments), _pictures(arguments)
    initialize()
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    pipeline = load_pipeline(arguments.model, dtype=dtype)
    pipeline = with_adapters(pipeline, merged=arguments.lora)
    scales = [scale for _, scale in pictures.controls]
    pipeline = with_controls(pipeline, arguments.controlnet, scales)
    if cache is not None:
        pipeline = with_cache(pipeline, arguments.model, *cache)
    rate = _rate(arguments, pipeline)
    jobs = [plan(pipeline, request) for request in _requests(arguments, pipeline, pictures)]
    for path, pixels in zip(paths, _drawn(pipeline, jobs, arguments), strict=True):
        _write(path, pixels, rate)
        print(path)  # noqa: T201
    return 0


def _paths(arguments: Arguments) -> list[Path]:
    """A file for each image; ConfigError for an ending that is not a format."""
    from fornax.diffusion.pipelines.clips import VIDEO_FORMATS
    from fornax.diffusion.pipelines.pictures import FORMATS

    out, number = arguments.out, max(1, len(arguments.prompt)) * arguments.count
    if _format(out) not in {**FORMATS, **VIDEO_FORMATS}:
        raise ConfigError(
            f"--out {out}: end it in .png, .jpg or .webp; of a video in .mp4, .webp, .gif or .png"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")
    if number == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{i}{out.suffix}") for i in range(number)]


def _format(path: Path) -> str:
    ending = path.suffix.lower().removeprefix(".")
    return "jpeg" if ending == "jpg" else ending


def _rate(arguments: Arguments, pipeline: "Pipeline") -> float | None:
    """Frames per second where the model draws videos; ConfigError for a file that it cannot
    fill."""
    from fornax.diffusion.pipelines.clips import VIDEO_FORMATS, check_video
    from fornax.diffusion.pipelines.pictures import FORMATS

    form = _format(arguments.out)
    if pipeline.frames is None:
        for name in ("frames", "fps"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name} is of videos, and this model draws images; leave it out"
                )
        if form not in FORMATS:
            raise ConfigError(
                f"--out {arguments.out}: this model draws images; end it in .png, .jpg or .webp"
            )
        return None
    if form not in VIDEO_FORMATS:
        raise ConfigError(
            f"--out {arguments.out}: this model draws videos; end it in .mp4, .webp, .gif or .png"
        )
    rate = pipeline.frames.rate if arguments.fps is None else arguments.fps
    check_video(form, rate)
    return rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pictures:
    """What the files hold that the flags name, before a model is loaded."""

    size: "Size | None"
    images: "list[Image.Image]"
    mask: "Image.Image | None"
    controls: "list[tuple[Image.Image, float]]"
    """Each with its scale."""


def _pictures(arguments: Arguments) -> _Pictures:
    from fornax.diffusion.pipelines import parse_size
    from fornax.diffusion.pipelines.load import parse_adapter
    from fornax.diffusion.pipelines.pictures import open_picture

    mask, controls = arguments.mask, [parse_adapter(one, "--control") for one in arguments.control]
    return _Pictures(
        size=None if arguments.size is None else parse_size(arguments.size),
        images=[open_picture(path, f"--image {path}") for path in arguments.image],
        mask=None if mask is None else open_picture(mask, f"--mask {mask}"),
        controls=[(open_picture(Path(p), f"--control {p}"), scale) for p, scale in controls],
    )


def _requests(
    arguments: Arguments, pipeline: "Pipeline", pictures: _Pictures
) -> "list[ImageRequest]":
    from fornax.diffusion.pipelines import ImageRequest, shown
    from fornax.diffusion.pipelines.pictures import read_mask, to_array

    size, strength, masked = pictures.size or pipeline.size, arguments.strength, pictures.mask
    return [
        ImageRequest(
            prompt=prompt,
            negative=arguments.negative,
            count=arguments.count,
            size=size,
            frames=arguments.frames,
            rate=arguments.fps,
            steps=arguments.steps,
            guidance=arguments.guidance,
            seed=arguments.seed,
            sampler=arguments.sampler,
            strength=strength,
            mask=None if masked is None else read_mask(masked, size),
            controls=tuple((to_array(one, size, 3) + 1) / 2 for one, _ in pictures.controls),
            **shown(pipeline, pictures.images, size, strength=strength, masked=masked is not None),
        )
        for prompt in arguments.prompt or (None,)
    ]


def _cache(arguments: Arguments) -> "tuple[CacheName, float] | None":
    from fornax.diffusion.pipelines.calibration import parse_cache

    if arguments.cache is not None:
        return parse_cache(arguments.cache)
    if arguments.compare:
        raise ConfigError(
            "--compare is of a cache of steps; choose one with --cache teacache or --cache magcache"
        )
    return None


def _drawn(pipeline: "Pipeline", jobs: "list[Job]", arguments: Arguments) -> "Iterator[np.ndarray]":
    """The images of all jobs in order, some at once; what a cache did goes to standard error."""
    from fornax.diffusion.pipelines import join
    from fornax.diffusion.pipelines.calibration import CountedScan

    whole, counted = join(jobs), None
    if pipeline.cache is None:
        draw = pipeline.scan(whole.table)
    else:
        plain = pipeline.scan(whole.table) if arguments.compare else None
        draw = counted = CountedScan(pipeline, whole, plain)
    for start in range(0, len(whole.start_BX), arguments.batch):
        yield from pipeline.images(draw(whole.rows(start, start + arguments.batch)))
    if counted is not None:
        print(counted.measured(), file=sys.stderr)  # noqa: T201


def _write(path: Path, pixels: "np.ndarray", rate: float | None) -> None:
    """An image's file, or with a rate a video's."""
    from fornax.diffusion.pipelines.clips import encode_video
    from fornax.diffusion.pipelines.pictures import encode_picture

    form = _format(path)
    try:
        video = rate is not None
        data = encode_video(pixels, form, rate) if video else encode_picture(pixels, form, 95)
        write_whole(path, data)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another with --out"
        ) from None
