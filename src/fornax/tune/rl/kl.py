"""The coefficient of the divergence from the reference: fixed, or led towards a target."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = ["AdaptiveKL", "FixedKL", "KLController"]


@dataclass(frozen=True, kw_only=True)
class FixedKL:
    """The same coefficient in every round."""

    type: Literal["fixed"] = "fixed"
    coefficient: float = 0.05
    """What a token's divergence from the reference takes off its reward; 0 keeps no reference."""

    def __post_init__(self) -> None:
        """Check the number."""
        if self.coefficient < 0:
            raise ConfigError(f"coefficient={self.coefficient} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that leads the divergence to a target (Ziegler et al. 2019)."""

    type: Literal["adaptive"] = "adaptive"
    coefficient: float = 0.2
    """At the start."""
    target: float = 6.0
    """Divergence of a completion, in nats summed over its tokens, that is aimed at."""
    horizon: int = 10000
    """Completions in which the coefficient follows an error of the target's size."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("coefficient", "target", "horizon"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")


@dataclass(kw_only=True)
class KLController:
    """The coefficient as it stands; `update` moves it after each round."""

    config: FixedKL | AdaptiveKL
    coefficient: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin at the start."""
        self.coefficient = self.config.coefficient

    def update(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Take a round's numbers; returns the coefficient that it used.

        beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon).
        """
        used = {"kl_coefficient": self.coefficient}
        config = self.config
        if isinstance(config, AdaptiveKL) and "kl_reference_sum" in numbers:
            error = numbers["kl_reference_sum"] / config.target - 1
            step = min(max(error, -0.2), 0.2) * numbers["rollout_completions"] / config.horizon
            self.coefficient *= 1 + step
        return used

    def state(self) -> dict[str, float]:
        """All it remembers."""
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from there."""
        self.coefficient = state["coefficient"]
