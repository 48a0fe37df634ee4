"""A trained denoiser as a function in a bundle, `denoise`, which needs none of this code.

Every operation is left to XLA, in float32, so that a bundle runs on any platform.
Legend: b rows, H and W of the example's size, C channels, S words of a caption.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fornax import export
from fornax.config.errors import ConfigError
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.load import load_run
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import Objective
from fornax.diffusion.predictions import Point
from fornax.diffusion.prompts import WordsConfig
from fornax.diffusion.task import check_sizes
from fornax.kernels.registry import target_platform

if TYPE_CHECKING:
    from fornax.export.manifest import Manifest

__all__ = ["export_denoiser"]


def export_denoiser(
    model: str | Path,
    out: str | Path,
    *,
    batch: Sequence[int] = (1, 8),
    size: Size | None = None,
    frames: int | None = None,
    dtype: Any = None,
    **options: Any,
) -> "Manifest":
    """Seal `denoise(x, time, words) -> output` in a bundle.

    `x` float32 [b, H, W, C] (of videos [b, F, H, W, C]) is alpha data + sigma noise, `time` float32
    [b] as schedules have it (1000 sigma on flows), `words` int32 [b, S] (or `classes` [b]) as
    `Prompts.encode` gives them; `output`, float32 of x's shape, is what the metadata's
    `objective.prediction` says. The metadata also has the words, so that a client needs nothing
    else to sample.

    Args:
      model: a run directory.
      out: the bundle to make.
      batch: rows that it is compiled for.
      size: height and width; None takes the usual one of the training data.
      frames: of a video; None likewise.
      dtype: of the weights; None keeps the run's.
      **options: further ones of `export.save`: platforms, overwrite, executables, ...

    Raises:
      ConfigError, CheckpointError: no such run; a size or frames that the network cannot take;
        texts that were encoded before the run.
      BundleError: from `export.save`.
    """
    # Attention in bfloat16 would go to a GPU's own library.
    run = load_run(model, dtype=dtype, compute_dtype=jnp.float32)
    count = run.facts.usual[:-2] if frames is None else (frames,)
    place = (*count, *(size or run.facts.usual[-2:]))
    check_sizes([place], run.denoiser.config)
    shape = (*place, run.facts.channels)
    inputs = {
        "x": export.Spec(("b", *shape), "float32"),
        "time": export.Spec(("b",), "float32", low=0.0, high=1000.0),
    }
    prompts = run.facts.prompts
    encoded = {"text_BSD", "pooled_BD"} & set(run.network.takes)
    if prompts is None and encoded:
        raise ConfigError(
            f"{model} was trained on texts that were encoded before; put its network into the "
            "folder of diffusers that it was trained as (fornax convert --pipeline DIR), and "
            "export that"
        )
    if prompts is not None:
        words = isinstance(prompts.config, WordsConfig)
        name, more = ("words", (prompts.config.length,)) if words else ("classes", ())  # pyrefly: ignore[missing-attribute]
        inputs[name] = export.Spec(("b", *more), "int32", low=0, high=prompts.count)
    objective = run.objective

    def denoise(network: Network, **given: jax.Array) -> dict[str, jax.Array]:
        x_BX, time_B = given.pop("x"), given.pop("time")
        # There is no native kernel off the CPU.
        with target_platform("gpu"):
            output_BX = network(
                x_BX, objective, _point(objective, time_B), network.condition(given)
            )
        return {"output": output_BX.astype(jnp.float32)}

    return export.save(
        out,
        {"denoise": denoise},
        run.network,
        inputs={"denoise": inputs},
        buckets={"b": list(batch)},
        metadata={
            "kind": "denoiser",
            "objective": dataclasses.asdict(objective),
            "words": None if prompts is None else list(prompts.known),
            "shape": list(shape),
            "sample": dataclasses.asdict(run.sample),
        }
        | options.pop("metadata", {}),
        **options,
    )


def _point(objective: Objective, time_B: jax.Array) -> Point:
    """The level of a time; of `edm`, whose input is scaled, sigma too."""
    sigma_B = jnp.exp(4 * time_B) if objective.path == "edm" else time_B
    return Point(time_B, jnp.ones_like(time_B), sigma_B)
