"""What a user may say about preference optimization: `fornax tune dpo` and `fornax tune kto`."""

from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.optim import OptimConfig
from fornax.tune.config import TuneConfig, recipe
from fornax.tune.configs.losses import DPO, IPO, PreferenceLoss, RobustDPO

__all__ = ["KTOConfig", "PreferenceConfig", "ReferenceKind"]

ReferenceKind = Literal["stored", "adapter"]
"""Where the reference's log-probs come from: computed for every example before the first step, and
stored in `reference/` of the run; or from the model with its adapters off, in each step."""


def _check_reference(config: "PreferenceConfig | KTOConfig") -> None:
    if config.reference != "adapter":
        return
    if config.lora is None:
        raise ConfigError(
            "reference=adapter looks past adapters, and there are none; set lora.rank, or use "
            "reference=stored"
        )
    if config.reference_model is not None:
        raise ConfigError(
            "reference=adapter takes the policy's own base as the reference; use reference=stored "
            f"with reference_model={config.reference_model}"
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TuneConfig):
    """A run of `fornax tune dpo`: pairs of a better and a worse completion."""

    loss: PreferenceLoss = field(default_factory=DPO)
    """What is minimised."""
    reference: ReferenceKind = "stored"
    """Where the reference's log-probs come from, for losses that have one."""
    reference_model: str | None = None
    """A Hugging Face directory or run to compare with; null: the policy as it starts."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-6))
    """Optimizer, schedule, clipping; adapters take ten times the learning rate and more."""

    def __post_init__(self) -> None:
        """Check the combination."""
        super().__post_init__()
        _check_reference(self)
        if self.reference_model is not None and not isinstance(self.loss, DPO | RobustDPO | IPO):
            raise ConfigError(
                f"loss.type={self.loss.type} has no reference, and reference_model="
                f"{self.reference_model} would not be read; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class KTOConfig(TuneConfig):
    """A run of `fornax tune kto`: single completions labelled desirable or not.

    Ethayarajh et al. 2024 (arXiv:2402.01306).
    """

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable completions. The paper keeps desirable_weight * desirable completions
    within 1 to 4/3 of undesirable_weight * undesirable ones."""
    undesirable_weight: float = 1.0
    """Weight of undesirable completions."""
    reference: ReferenceKind = "stored"
    """Where the reference's log-probs come from."""
    reference_model: str | None = None
    """A Hugging Face directory or run to compare with; null: the policy as it starts."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-6))
    """Optimizer, schedule, clipping; adapters take ten times the learning rate and more."""

    def __post_init__(self) -> None:
        """Check the combination."""
        super().__post_init__()
        _check_reference(self)
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.batch_size < 2:
            raise ConfigError(
                f"batch_size={self.batch_size}: the baseline is a mean over the batch; use 2 or "
                "more, better 16"
            )
