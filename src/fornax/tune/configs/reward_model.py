"""What a user may say about a reward model: `fornax tune reward`."""

from dataclasses import dataclass, field

from fornax.config.errors import ConfigError
from fornax.optim import OptimConfig
from fornax.tune.config import TuneConfig, recipe

__all__ = ["RewardModelConfig"]


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TuneConfig):
    """A run of `fornax tune reward`: a scalar head that ranks the better completion higher."""

    centre: float = 0.0
    """Weight of the squared sum of a pair's scores (Eisenstein et al., 2023): it draws their mean
    to 0, so that scores of different prompts can be compared; 0.01 is usual."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-5))
    """Optimizer, schedule, clipping; adapters take ten times the learning rate and more."""
    train_head_only: bool = False
    """Whether the decoder stays as it is, and only the head learns."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.centre < 0:
            raise ConfigError(f"centre={self.centre} must be 0 or more")
        if self.train_head_only and self.lora is not None:
            raise ConfigError("train_head_only trains no adapters; leave lora out")
