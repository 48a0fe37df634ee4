"""Rotary embeddings and the scalings of their frequencies, as configs."""

import math
from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RopeConfig",
    "RopeScaling",
    "YarnScaling",
]


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by a factor."""

    type: Literal["linear"] = "linear"
    factor: float
    """How many times longer the context becomes."""

    def __post_init__(self) -> None:
        _positive("factor", self.factor)


@dataclass(frozen=True, kw_only=True)
class DynamicNTKScaling:
    """NTK-aware scaling of the base, growing with the longest position of the batch.

    Up to `max_position_embeddings` it changes nothing.
    """

    type: Literal["dynamic"] = "dynamic"
    factor: float
    """How fast the base grows beyond `max_position_embeddings`."""

    def __post_init__(self) -> None:
        _positive("factor", self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): high frequencies kept, low ones divided, a ramp between."""

    type: Literal["yarn"] = "yarn"
    factor: float
    """How many times longer the context becomes."""
    original_max_position_embeddings: int
    """Context length before the extension."""
    beta_fast: float = 32.0
    """Rotations over the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations over the original context below which a frequency is divided by `factor`."""
    attention_factor: float | None = None
    """Factor on cosines and sines; None computes it from `factor` and the two scales below."""
    mscale: float | None = None
    """Numerator scale of the attention factor; used only when `mscale_all_dim` is set too."""
    mscale_all_dim: float | None = None
    """Denominator scale of the attention factor; used there only when `mscale` is set too. In
    latent attention the square of its temperature multiplies the scores."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions."""

    def __post_init__(self) -> None:
        _positive("factor", self.factor)
        _positive("original_max_position_embeddings", self.original_max_position_embeddings)

    def temperature(self, scale: float) -> float:
        """YaRN's equation 22 with its logarithm times `scale`: 1 where nothing is extended."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, others beyond the old length."""

    type: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    """Divisor of each frequency while the batch stays within the original length."""
    long_factor: tuple[float, ...]
    """Divisor of each frequency when the batch's longest position goes beyond it."""
    original_max_position_embeddings: int
    """Context length before the extension."""
    factor: float | None = None
    """Extension behind the attention factor; None takes max / original position embeddings."""
    attention_factor: float | None = None
    """Factor on cosines and sines; None is sqrt(1 + ln(factor) / ln(original length))."""

    def __post_init__(self) -> None:
        _positive("original_max_position_embeddings", self.original_max_position_embeddings)
        if len(self.short_factor) != len(self.long_factor):
            raise ConfigError(
                f"short_factor has {len(self.short_factor)} values and long_factor "
                f"{len(self.long_factor)}; both need one value per rotated frequency"
            )


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies divided, high ones kept, a smooth step between."""

    type: Literal["llama3"] = "llama3"
    factor: float
    """Divisor of the low frequencies."""
    low_freq_factor: float
    """Wavelengths above original length / this are divided."""
    high_freq_factor: float
    """Wavelengths below original length / this are kept."""
    original_max_position_embeddings: int
    """Context length before the extension."""

    def __post_init__(self) -> None:
        _positive("factor", self.factor)
        _positive("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


RopeScaling = LinearScaling | DynamicNTKScaling | YarnScaling | LongRopeScaling | Llama3Scaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings (Su et al. 2021)."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    fraction: float = 1.0
    """Share of each head's width that is rotated; the rest passes unrotated."""
    turning: float = 1.0
    """Share of the rotated pairs that turn, those of the highest frequencies; the others stand
    still (the "proportional" rope of Gemma 4)."""
    interleaved: bool = False
    """Whether a pair that rotates lies side by side in a head, not half the rotated width apart."""
    scaling: RopeScaling | None = None
    """How the frequencies are changed for longer contexts; None leaves them."""

    def __post_init__(self) -> None:
        _positive("theta", self.theta)
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction} must be above 0 and at most 1")
        if not 0 < self.turning <= 1:
            raise ConfigError(f"turning={self.turning} must be above 0 and at most 1")
        if self.turning != 1 and not isinstance(self.scaling, LinearScaling | None):
            raise ConfigError(
                f"turning={self.turning} goes with linear scaling or none, not with "
                f"{self.scaling.type}"
            )


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}={value} must be above 0")
