"""What a run trains: a denoiser, and the table of words where captions are learned with it.

Shapes: x_BX is a batch of noisy examples, channels last.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.diffusion.models import Condition
from fornax.diffusion.objectives import Objective
from fornax.diffusion.predictions import Point, along, preconditioning
from fornax.diffusion.prompts import WordEncoder

__all__ = ["NAMES", "Network", "apply"]

NAMES = {
    "classes": "classes_B",
    "text": "text_BSD",
    "text_mask": "text_mask_BS",
    "pooled": "pooled_BD",
    "guidance": "guidance_B",
    "sizes": "sizes_BN",
    "text2": "text2_BSD",
    "image": "image_BX",
    "first": "first_BX",
}
"""An array of a batch, and the field of `Condition` that it is."""


def apply(
    denoiser: Any,
    objective: Objective,
    x_BX: jax.Array,
    point: Point,
    condition: Condition,
    remat: str = "none",
) -> jax.Array:
    """The denoiser's output at noise levels, each () or (B,), with the input scaled as EDM does.

    `remat` is what the backward pass computes again of each block (`fornax.models.remat`).
    """
    time_B = jnp.broadcast_to(jnp.asarray(point.t, jnp.float32), x_BX.shape[:1])
    if objective.path == "edm":
        scale = preconditioning(point.sigma, objective.sigma_data)[2]
        x_BX = x_BX * along(jnp.asarray(scale), x_BX)
    options = {} if remat == "none" else {"remat": remat}
    # What some networks say behind it of the noise's variance is not trained.
    return denoiser(x_BX, time_B, condition, **options)[..., : x_BX.shape[-1]]


class Network(nnx.Module):
    """A denoiser with what turns the integers of a batch into its condition.

    Attributes:
      denoiser: (x_BX, time_B, condition) to its output.
      encoder: of words; None for labels, for conditions that come encoded, and for none.
    """

    def __init__(self, denoiser: Any, encoder: WordEncoder | None, takes: tuple[str, ...]):
        """Put them together; `takes` names the fields of `Condition` that the denoiser reads."""
        self.denoiser = denoiser
        self.encoder = encoder
        self.takes = takes

    def __call__(
        self,
        x_BX: jax.Array,
        objective: Objective,
        point: Point,
        condition: Condition,
        *,
        remat: str = "none",
    ) -> jax.Array:
        """The denoiser's output; see `apply`."""
        return apply(self.denoiser, objective, x_BX, point, condition, remat)

    def condition(self, batch: Mapping[str, Any]) -> Condition:
        """The condition in a batch: of `words`, `classes`, or fields of `Condition` as they are."""
        if self.encoder is not None:
            return only(self.encoder(batch["words"]), self.takes)
        given = {NAMES[name]: array for name, array in batch.items() if name in NAMES}
        return only(Condition(**given), self.takes)


def only(condition: Condition, takes: tuple[str, ...]) -> Condition:
    """The condition without the fields that a denoiser does not read."""
    left_out = {f.name: None for f in fields(condition) if f.name not in takes}
    return replace(condition, **left_out)
