"""What a path holds, loaded: a folder of diffusers, or a run of `fornax diffusion train`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from fornax.config import did_you_mean
from fornax.config.errors import ConfigError
from fornax.diffusion.config import takes
from fornax.diffusion.load import TunedRun, is_diffusion_run, is_pipeline, open_tuned
from fornax.diffusion.lora import Adapter, ByRow, merge_lora, read_lora
from fornax.diffusion.models.components import load_component
from fornax.diffusion.models.unet import UNet
from fornax.diffusion.network import Network
from fornax.diffusion.pipelines.control import Controlled, check_control
from fornax.diffusion.pipelines.editing import EDITING_FAMILIES
from fornax.diffusion.pipelines.experts import Experts
from fornax.diffusion.pipelines.families import FAMILIES
from fornax.diffusion.pipelines.language_families import LANGUAGE_FAMILIES
from fornax.diffusion.pipelines.parts import Parts
from fornax.diffusion.pipelines.pipeline import Pipeline
from fornax.diffusion.pipelines.trained import trained_pipeline
from fornax.diffusion.pipelines.video import VIDEO_FAMILIES

__all__ = [
    "PIPELINES",
    "load_pipeline",
    "open_parts",
    "parse_adapter",
    "pipeline_of",
    "trained_networks",
    "with_adapters",
    "with_controls",
]

PIPELINES = {**FAMILIES, **LANGUAGE_FAMILIES, **EDITING_FAMILIES, **VIDEO_FAMILIES}
"""What loads a folder, by `_class_name` of its model_index.json."""


def load_pipeline(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
) -> Pipeline:
    """Load a model that draws.

    Args:
      path: a folder with model_index.json, or a run directory.
      dtype: of the weights; None for what is stored.
      compute_dtype: of the products; None for that of the weights.

    Raises:
      ConfigError: neither, or a pipeline or a part of a class that is not known.
      CheckpointError: a file that is missing or damaged.
      DataError: a tokenizer that is missing or damaged.
    """
    path = Path(path)
    if is_diffusion_run(path):
        found = tuned_pipeline(path, dtype, compute_dtype)
        return found or trained_pipeline(path, dtype, compute_dtype)
    return pipeline_of(open_parts(path, dtype, compute_dtype))


def parse_adapter(text: str, what: str = "adapter") -> tuple[str, float]:
    """`FILE[:SCALE]` as a path and a factor, 1 where there is none; `what` names it in errors.

    Raises:
      ConfigError: a scale that is not finite.
    """
    path, _, said = text.rpartition(":")
    if not path:
        return text, 1.0
    try:
        scale = float(said)
    except ValueError:
        return text, 1.0
    if not math.isfinite(scale):
        raise ConfigError(f"{what} {text!r}: scale {said} is not finite; write FILE:0.8")
    return path, scale


def with_adapters(
    pipeline: Pipeline, *, merged: Sequence[str] = (), named: Mapping[str, str] | None = None
) -> Pipeline:
    """A pipeline with adapters, each `FILE[:SCALE]` (`read_lora`); of two networks, `EARLY,LATE` of
    such, where one side may be empty.

    Args:
      pipeline: of a folder of diffusers, or a run that was tuned from one.
      merged: added to its weights, in place.
      named: of which each request has one (`ImageRequest.adapter`) or none.

    Raises:
      ConfigError: another model's adapter, or a pipeline that has no files of diffusers.
      CheckpointError: no such file, or a damaged one.
    """
    if not merged and not named:
        return pipeline
    denoiser: Any = pipeline.denoiser
    networks = [denoiser.unet if isinstance(denoiser, Controlled) else denoiser]
    if isinstance(denoiser, Experts):
        networks = [denoiser.early, denoiser.late]
    if not hasattr(networks[0].config, "class_name"):
        raise ConfigError(f"{pipeline.name} takes no adapters; they are for folders of diffusers")
    prefix = "unet" if isinstance(networks[0], UNet) else "transformer"

    def read(text: str) -> list[tuple[Adapter, float]]:
        two = len(networks) == 2
        files = text.split(",") if two else [text]
        if two and (len(files) != 2 or not any(files)):
            raise ConfigError(
                f"adapter {text!r}: {pipeline.name} draws with two networks; write EARLY,LATE: the "
                "file of transformer, a comma, that of transformer_2, and nothing for none"
            )
        places = map(parse_adapter, files)
        return [
            (
                Adapter(name="", pairs={})
                if two and not path
                else read_lora(path, network, prefix),
                scale,
            )
            for (path, scale), network in zip(places, networks, strict=True)
        ]

    for text in merged:
        for network, adapter in zip(networks, read(text), strict=True):
            merge_lora(network, *adapter)
    if not named:
        return pipeline
    if isinstance(denoiser, Controlled):
        raise ConfigError(f"{pipeline.name} has a ControlNet, beside which adapters are merged")
    found = zip(*map(read, named.values()), strict=True)
    first, *rest = (ByRow(network, each) for network, each in zip(networks, found, strict=True))
    whole = Experts(first, rest[0], denoiser.boundary) if rest else first
    return dataclasses.replace(pipeline, denoiser=whole, adapters=tuple(named))


def with_controls(
    pipeline: Pipeline, folders: Sequence[str | Path] = (), scales: Sequence[float] = ()
) -> Pipeline:
    """A pipeline of Stable Diffusion with further ControlNets, behind those of its own folder.

    Args:
      pipeline: of a folder of diffusers, or a run that was tuned from one.
      folders: each of one ControlNet, as diffusers saved it.
      scales: factors on the residuals of all ControlNets, those of the folder first; none for 1.

    Raises:
      ConfigError: a ControlNet of another model, a pipeline that takes none, or another number of
        scales than of ControlNets.
      CheckpointError: no such folder, or a damaged one.
    """
    if not folders and not any(scale != 1 for scale in scales):
        return pipeline
    own: Any = pipeline.denoiser
    parts = pipeline.parts
    unet = own.unet if isinstance(own, Controlled) else own
    if not isinstance(unet, UNet) or parts is None or pipeline.fills:
        raise ConfigError(
            f"{pipeline.name} takes no ControlNet: they are for folders of Stable Diffusion 1.x, "
            "2.x and XL, except those that fill masks alone; leave it out"
        )
    controls = list(own.controls) if isinstance(own, Controlled) else []
    for folder in folders:
        control: Any = load_component(folder, **parts.dtypes)
        check_control(control, unet, pipeline.multiple, folder)
        controls.append(control)
    if not controls:
        return pipeline  # which refuses images to follow
    scales = tuple(scales) or (1.0,) * len(controls)
    if len(scales) != len(controls):
        raise ConfigError(
            f"{len(scales)} images to follow (--control), and {len(controls)} ControlNets; give "
            "one for each, in their order"
        )
    denoiser = Controlled(unet, controls, scales)
    return dataclasses.replace(pipeline, denoiser=denoiser, follows=len(controls))


def open_parts(
    path: Path,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    modules: Mapping[str, nnx.Module] = MappingProxyType({}),
) -> Parts:
    """The parts of a folder that diffusers saved; arguments as of `Parts`.

    Raises:
      ConfigError: no such folder, or a pipeline of a class that is not known.
      CheckpointError: model_index.json cannot be read.
    """
    if not is_pipeline(path):
        if path.is_file():
            raise ConfigError(
                f"{path} is a single file, without text encoders and a schedule in known places; "
                "make a folder of it with diffusers, StableDiffusionPipeline.from_single_file(FILE)"
                ".save_pretrained(DIR), or the class of its model, and name that"
            )
        what = "does not exist" if not path.exists() else "holds no diffusion model"
        raise ConfigError(
            f"{path} {what}: name a folder that diffusers saved, with model_index.json, or a run "
            "directory of fornax diffusion train"
        )
    parts = Parts(path, dtype, compute_dtype, modules)
    name = str(parts.index.get("_class_name"))
    if name not in PIPELINES:
        raise ConfigError(f"{path}: pipeline {name} is not known; {did_you_mean(name, PIPELINES)}")
    return parts


def pipeline_of(parts: Parts) -> Pipeline:
    """The pipeline of parts; errors are those of `load_pipeline`."""
    return dataclasses.replace(PIPELINES[str(parts.index["_class_name"])](parts), parts=parts)


def tuned_pipeline(
    path: Path, dtype: DTypeLike | None = None, compute_dtype: DTypeLike | None = None
) -> Pipeline | None:
    """The pipeline of a run that tunes a folder of diffusers, adapters merged; None for others."""
    run = open_tuned(path)
    if run is None:
        return None
    trained = trained_networks(run, open_parts(run.folder, dtype, compute_dtype))
    modules = {name: network.denoiser for name, network in trained.items()}
    found = pipeline_of(open_parts(run.folder, dtype, compute_dtype, modules))
    return dataclasses.replace(found, name=str(path))


def trained_networks(
    run: TunedRun, parts: Parts, *, merge: bool = True, **options: Any
) -> dict[str, Network]:
    """What a run of tuning and those before it made of networks of their folder, by component.

    Args:
      run: of tuning.
      parts: of its folder, whose networks are used up.
      merge: as of `TunedRun.restore`.
      **options: as of `Parts.module`.
    """

    def load(component: str) -> Network:
        denoiser: Any = parts.module(component, **options)
        return Network(denoiser, None, takes(denoiser.config))

    return run.restore(load, parts.denoisers[0], merge=merge)
