"""The denoiser of a folder of diffusers as a function in a bundle, `denoise`.

As with a run's (`fornax.diffusion.exporting`) every operation is left to XLA, in float32. Texts are
encoded by the client, or by another bundle.
Legend: b rows, X axes of a latent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax import export
from fornax.config.errors import ConfigError
from fornax.diffusion.models import Condition
from fornax.diffusion.network import NAMES
from fornax.diffusion.pipelines.load import load_pipeline
from fornax.diffusion.pipelines.pipeline import Size
from fornax.diffusion.pipelines.request import blank_request, plan
from fornax.diffusion.predictions import Point
from fornax.kernels.registry import target_platform

if TYPE_CHECKING:
    from fornax.export.manifest import Manifest

__all__ = ["export_pipeline"]

_NAMES = {**NAMES, "text2_mask": "text2_mask_BS"}


def export_pipeline(
    model: str | Path,
    out: str | Path,
    *,
    batch: Sequence[int] = (1, 8),
    size: Size | None = None,
    frames: int | None = None,
    dtype: DTypeLike | None = None,
    **options: Any,
) -> "Manifest":
    """Seal `denoise(x, time, ...) -> output` in a bundle.

    `x` float32 [b, *X] is a noisy latent, `time` float32 [b] as schedules have it (0 to 1000). The
    other inputs are those fields of `Condition` that the model receives, by the names of encoded
    examples: `text`, `text_mask`, `pooled`, `sizes`, `guidance`, `classes`, `text2`, `text2_mask`,
    `image` (beside x: a mask and latents, or pictures for ControlNets) and `first` (the latents of
    a video's first frame).
    `output`, float32 of x's shape, is what the metadata's `prediction` says; `points` are t, alpha
    and sigma of the model's usual steps, [steps + 1, 3].

    Args:
      model: a folder with model_index.json, or a run that was tuned from one.
      out: the bundle to make.
      batch: rows that it is compiled for.
      size: height and width in pixels; None for the model's.
      frames: of a video; None for the model's.
      dtype: of the weights; None for what is stored.
      **options: further ones of `export.save`.

    Raises:
      ConfigError, CheckpointError: from `load_pipeline`; a model that edits images, of any number
        and size; a size or frames that it does not draw.
      BundleError: from `export.save`.
    """
    # Attention in bfloat16 would go to a GPU's own library.
    pipeline = load_pipeline(model, dtype=dtype, compute_dtype=jnp.float32)
    if pipeline.references is not None and pipeline.references.needed:
        raise ConfigError(
            f"{model} edits images, whose number and sizes are of each request, and denoise takes "
            "inputs of one shape; draw with fornax diffusion sample"
        )
    job = plan(pipeline, blank_request(pipeline, size or pipeline.size, frames=frames))
    fields = {
        name: getattr(job.condition, field)
        for name, field in _NAMES.items()
        if getattr(job.condition, field) is not None
    }

    def denoise(denoiser: nnx.Module, **given: jax.Array) -> dict[str, jax.Array]:
        x_BX, time_B = given.pop("x"), given.pop("time")
        condition = Condition(**{_NAMES[name]: array for name, array in given.items()})  # pyrefly: ignore[bad-argument-type]
        point = Point(time_B, jnp.ones_like(time_B), time_B)
        # There is no native kernel off the CPU.
        with target_platform("gpu"):
            output_BX = pipeline.network(denoiser, condition, None, 1.0)(x_BX, point)
        return {"output": output_BX.astype(jnp.float32)}

    inputs = {
        "x": export.Spec(("b", *job.start_BX.shape[1:]), "float32"),
        "time": export.Spec(("b",), "float32", low=0.0, high=1000.0),
    } | {name: _spec(name, array) for name, array in fields.items()}
    return export.save(
        out,
        {"denoise": denoise},
        pipeline.denoiser,
        inputs={"denoise": inputs},
        buckets={"b": list(batch)},
        metadata={
            "kind": "denoiser",
            "prediction": pipeline.prediction,
            "guidance": pipeline.guidance,
            "scale": pipeline.scale,
            "points": np.asarray(job.table.points, np.float64).tolist(),
            "shape": list(job.start_BX.shape[1:]),
        }
        | options.pop("metadata", {}),
        **options,
    )


def _spec(name: str, array: jax.Array) -> export.Spec:
    """Of a field of the condition; generated masks have no padding, whose rows could be empty."""
    shape = ("b", *array.shape[1:])
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return export.Spec(shape, "float32")
    least = 1 if name.endswith("mask") else 0
    return export.Spec(shape, "int32", low=least, high=least + 1)
