"""A pipeline as a folder of diffusers: model_index.json and a folder for each component."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import replacing_folder
from fornax.diffusion.models.components import save_component
from fornax.diffusion.pipelines.control import Controlled
from fornax.diffusion.pipelines.experts import Experts
from fornax.diffusion.pipelines.parts import Parts
from fornax.diffusion.pipelines.pipeline import Pipeline

__all__ = ["check_target", "save_pipeline", "with_denoiser"]

_INDEX = "model_index.json"


def save_pipeline(
    pipeline: Pipeline,
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
) -> None:
    """Write a pipeline as diffusers does, whole or not at all.

    Networks are written from memory, the pipeline's `denoiser` in its place. Tokenizers, the
    scheduler's settings, language models and what else model_index.json names are copied from the
    folder that the pipeline was loaded from.

    Args:
      pipeline: of `load_pipeline`, perhaps `with_denoiser` of another.
      folder: to make.
      dtype: of the written networks; None for what they have.
      overwrite: replace a pipeline's folder that is there already.

    Raises:
      ConfigError: the pipeline is of a run or has ControlNets of `with_controls`, or the folder and
        its own are inside each other.
      CheckpointError: the folder exists, a component to copy does not, or it cannot be written.
    """
    parts = pipeline.parts
    if parts is None:
        raise ConfigError(
            f"{pipeline.name} is a run, whose network and words diffusers has no pipeline for; "
            "sample, serve and export it as it is"
        )
    if pipeline.follows != len(parts.controls):
        raise ConfigError(
            f"{pipeline.name} draws with {pipeline.follows} ControlNets, and its folder names "
            f"{len(parts.controls)}: give one without those of with_controls, which are folders of "
            "their own"
        )
    target, source = Path(folder).resolve(), parts.folder
    check_target(target, source, overwrite)
    modules = {**parts.modules, **_drawing(pipeline, parts)}
    try:
        with replacing_folder(target) as work:
            shutil.copy2(source / _INDEX, work / _INDEX)
            for name in components(parts):
                if name in modules:
                    save_component(_cast(modules[name], dtype), work / name)
                else:
                    _copy(source / name, work / name)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; nothing was changed there"
        ) from error


def with_denoiser(pipeline: Pipeline, network: nnx.Module) -> Pipeline:
    """A pipeline that draws with another network: a trained one, or one with adapters merged.

    Args:
      pipeline: of a folder of diffusers.
      network: of the config of its denoiser; the class that it is stored as may be another.

    Raises:
      ConfigError: a pipeline of a run, one of two networks, or a network of another config, with
        what differs.
    """
    parts = pipeline.parts
    if parts is None:
        raise ConfigError(f"{pipeline.name} is a run; name a folder with {_INDEX}")
    if isinstance(pipeline.denoiser, Experts):
        raise ConfigError(
            f"{parts.folder} draws with two networks, and one does not go into the place of both; "
            "write it into the folder of the one that it was trained as"
        )
    own: Any = parts.modules[parts.denoisers[0]]
    given: Any = network
    differs = _differences(own.config, given.config)
    if differs:
        raise ConfigError(
            f"a network that differs from that of {parts.folder} in {', '.join(differs)} does not "
            "go into its place; take the pipeline of the model that it was trained as"
        )
    graph = nnx.graphdef(own)
    merged = nnx.merge(graph, nnx.state(given))
    if isinstance(pipeline.denoiser, Controlled):
        merged = Controlled(merged, pipeline.denoiser.controls, pipeline.denoiser.scales)
    return dataclasses.replace(pipeline, denoiser=merged)


def components(parts: Parts) -> list[str]:
    """The names of a pipeline's components."""
    named = [name for name in parts.index if not name.startswith("_") and parts.has(name)]
    return [*named, *parts.controls[1:]]


def _drawing(pipeline: Pipeline, parts: Parts) -> dict[str, nnx.Module]:
    """The network that draws, by its component's name, where it is one component."""
    denoiser, name = pipeline.denoiser, parts.denoisers[0]
    if isinstance(denoiser, Controlled):
        denoiser = denoiser.unet
    return {name: denoiser} if type(denoiser) is type(parts.modules[name]) else {}


_FREE = ("class_name", "sample_size")
"""Fields of a config that change nothing of what a network computes."""


def _differences(own: Any, given: Any) -> list[str]:
    if type(own) is not type(given):
        return ["its kind"]
    names = [field.name for field in dataclasses.fields(own) if field.name not in _FREE]
    return [name for name in names if getattr(own, name) != getattr(given, name)]


def _cast(module: nnx.Module, dtype: DTypeLike | None) -> nnx.Module:
    if dtype is None:
        return module
    graph, state = nnx.split(module)

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return nnx.merge(graph, jax.tree.map(cast, state))


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(
            f"{source.parent / _INDEX} names {source.name}, and {source} is not a folder; copy it "
            f"there, or write [null, null] for {source.name}"
        )
    shutil.copytree(source, target)


def check_target(target: Path, source: Path, overwrite: bool) -> None:
    """Refuse a folder to make that would delete what is not a pipeline, or the source.

    Args:
      target: the folder to make.
      source: the folder that is read.
      overwrite: whether a pipeline's folder may be replaced.

    Raises:
      ConfigError: one lies in the other.
      CheckpointError: the folder exists.
    """
    target, source = target.resolve(), source.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise ConfigError(f"{target} and the source {source} are inside each other; choose another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another path, or --overwrite")
    if not (target / _INDEX).is_file():
        raise CheckpointError(
            f"{target} is not a pipeline's folder (it has no {_INDEX}), and overwriting would "
            "delete it; give another path"
        )
