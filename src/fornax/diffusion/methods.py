"""What `fornax diffusion tune` learns: images, fewer steps, or what is preferred."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = ["DMD2", "DPO", "Consistency", "Denoise", "FlowGRPO", "Method"]


@dataclass(frozen=True, kw_only=True)
class Denoise:
    """Denoising of the data."""

    type: Literal["denoise"] = "denoise"


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """Consistency distillation (LCM, Luo et al. 2023): sample with `lcm`, without guidance."""

    type: Literal["consistency"] = "consistency"
    levels: int = 40
    """Steps of the teacher between noise and data: few learn fast, many follow it closely."""
    guidance: float = 3.0
    """Of the teacher, which the student learns."""
    huber: float = 0.001
    """Error of an element below which the loss is quadratic."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        _at_least("levels", self.levels, 2)
        _at_least("huber", self.huber, 0)


@dataclass(frozen=True, kw_only=True)
class DMD2:
    """Distribution matching (Yin et al. 2024) without data and without their loss of a
    discriminator: sample with `lcm` in `steps` steps, without guidance. The network of what the
    student draws is trained at each step, the student at every `every`-th; set
    `optim.optimizer.b1` to 0, so that the student rests in between."""

    type: Literal["dmd2"] = "dmd2"
    steps: int = 4
    guidance: float = 3.0
    """Of the teacher."""
    every: int = 5

    def __post_init__(self) -> None:
        """Check the numbers."""
        _at_least("steps", self.steps, 1)
        _at_least("every", self.every, 1)


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Diffusion-DPO (Wallace et al. 2023) on pairs that the model draws and the judge of letters
    compares."""

    type: Literal["dpo"] = "dpo"
    beta: float = 2000.0
    """Strength of the tie to the reference."""
    draws: int = 256
    """Prompts that two images each are drawn of, before the first step; pairs of equal reward are
    left out."""
    held_out: bool = False
    """Draw and judge held-out pairs of letter and style as well, of which there are no images."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        _at_least("draws", self.draws, 1)
        if self.beta <= 0:
            raise ConfigError(f"method.beta={self.beta:g} must be above 0; 2000 to 5000 is usual")


@dataclass(frozen=True, kw_only=True)
class FlowGRPO:
    """Group-relative policy optimisation of stochastic sampling (Liu et al. 2025), with the judge
    of letters as the reward. `batch_size` counts images."""

    type: Literal["flow-grpo"] = "flow-grpo"
    steps: int = 6
    """Of the sampler."""
    eta: float = 0.7
    """Share of its noise that is fresh (`samplers.ddim`)."""
    group: int = 8
    """Images of a prompt, whose rewards are compared; it divides `batch_size`."""
    kl: float = 0.04
    """Weight of the divergence from the model that the run began with. It alone holds the last
    step, which adds no noise: with 0 images drift in a long run."""
    held_out: bool = False
    """Draw and judge held-out pairs of letter and style as well, of which there are no images."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        _at_least("steps", self.steps, 2)
        _at_least("group", self.group, 2)
        _at_least("kl", self.kl, 0)
        if not 0 < self.eta <= 1:
            raise ConfigError(f"method.eta={self.eta:g} must lie in (0, 1]")


Method = Denoise | Consistency | DMD2 | DPO | FlowGRPO


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"method.{name}={value:g} must be {least:g} or more")
