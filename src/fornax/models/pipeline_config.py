"""How a batch and the layers are divided over the stages of a pipeline."""

import math
from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.models.config import LayerKind

__all__ = ["PipelineConfig", "layers_outside"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the stages of `mesh.stage` work on a batch."""

    microbatches: int | None = None
    """Parts of the batch that follow each other through the stages, a multiple of `mesh.stage`;
    null makes two for each stage."""
    repeats: int = 1
    """How often a microbatch passes each stage, with other layers each time: a smaller bubble for
    more exchanges."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigError(f"pipeline.microbatches={self.microbatches} must be 1 or more")
        if self.repeats < 1:
            raise ConfigError(f"pipeline.repeats={self.repeats} must be 1 or more")

    def count(self, stages: int) -> int:
        """`microbatches`, resolved."""
        return 2 * stages if self.microbatches is None else self.microbatches


def layers_outside(
    kinds: tuple[LayerKind, ...], stages: int, pipeline: PipelineConfig, *, slices: int = 1
) -> int:
    """How many of the first layers run before the pipeline, on all devices: those that would be too
    many for parts of equal kinds, as few as can be.

    Args:
      kinds: of all layers.
      stages: of the pipeline, in all slices.
      pipeline: how they work.
      slices: that the stages lie in. In several no layer may be left over: all slices would need
        its parameters, and its gradients would cross between them.

    Raises:
      ConfigError: for numbers that fit neither each other nor the layers, naming those that do.
    """
    named, fix, left = f"mesh.stage={stages}", "give the devices of mesh.stage to mesh.fsdp", ""
    most = len(kinds)
    if slices > 1:
        named = f"mesh.slice={slices} x mesh.stage={stages // slices}"
        fix, left, most = "set mesh.across to data", ", with none left over between slices", 0
    microbatches = pipeline.count(stages)
    if microbatches % stages:
        raise ConfigError(
            f"pipeline.microbatches={microbatches} is not a multiple of {named}; use "
            f"{stages * math.ceil(microbatches / stages)}, or null for {2 * stages}"
        )
    parts = stages * pipeline.repeats
    found = _fewest_outside(kinds, parts, most)
    if found is not None:
        return found
    fitting = [
        n
        for n in range(2, len(kinds) + 1)
        if n % slices == 0 and _fewest_outside(kinds, n, most) is not None
    ]
    if fitting:
        fix = f"products that fit are {', '.join(map(str, fitting))}; change them, or {fix}"
    raise ConfigError(
        f"{named} x pipeline.repeats={pipeline.repeats} cuts the {len(kinds)} layers into {parts} "
        f"parts, which must be of the same kinds in the same order{left}; {fix}"
    )


def _fewest_outside(kinds: tuple[LayerKind, ...], parts: int, most: int) -> int | None:
    """How many first layers are left out of this many equal parts, at most this many; None where
    there are none such."""
    for count in range(min(most, len(kinds) - parts) + 1):
        rest = kinds[count:]
        if rest[: len(rest) // parts] * parts == rest:
            return count
    return None
