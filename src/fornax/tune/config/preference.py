"""Options of preference optimization and reward models."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fornax.config.errors import ConfigError
from fornax.optim import OptimConfig
from fornax.tune.config.base import TuneConfig, recipe

__all__ = [
    "CPO",
    "DPO",
    "IPO",
    "ORPO",
    "KTOConfig",
    "PreferenceConfig",
    "PreferenceLoss",
    "ReferenceConfig",
    "RewardModelConfig",
    "RobustDPO",
    "SimPO",
]


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if value <= 0:
            raise ConfigError(f"{name}={value} must be above 0")


def _smoothing(value: float) -> None:
    if not 0 <= value < 0.5:
        raise ConfigError(
            f"label_smoothing={value} must lie in [0, 0.5): it is the share of pairs whose labels "
            "are taken to be swapped"
        )


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimization (Rafailov et al., 2023); with `label_smoothing`, cDPO."""

    type: Literal["dpo"] = "dpo"
    beta: float = 0.1
    """How strongly the policy is held to the reference: smaller lets it move further."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round (cDPO, Mitchell 2023)."""
    nll_weight: float = 0.0
    """Weight of the chosen completion's mean negative log-likelihood, added to the loss; 1 keeps
    the chosen completions' probability from falling (Pang et al., 2024)."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        _smoothing(self.label_smoothing)
        if self.nll_weight < 0:
            raise ConfigError(f"nll_weight={self.nll_weight} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class RobustDPO:
    """DPO whose expectation over swapped labels is unbiased (Chowdhury et al., 2024)."""

    type: Literal["robust"] = "robust"
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.1
    """Share of pairs known to be labelled the wrong way round."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        _smoothing(self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class IPO:
    """Identity preference optimization (Azar et al., 2023), on log-probs averaged over tokens."""

    type: Literal["ipo"] = "ipo"
    beta: float = 0.1
    """Strength of the regularisation (tau in the paper): margins are drawn to 1 / (2 beta)."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class SimPO:
    """Reference-free, length-normalised preference optimization (Meng et al., 2024)."""

    type: Literal["simpo"] = "simpo"
    beta: float = 2.0
    """Scale of the averaged log-probs."""
    gamma: float = 1.0
    """Margin asked of chosen over rejected, in the same units as `beta` times a log-prob."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        if self.gamma < 0:
            raise ConfigError(f"gamma={self.gamma} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class ORPO:
    """Odds-ratio preference optimization (Hong et al., 2024): averaged log-probs, and the chosen
    completion's negative log-likelihood."""

    type: Literal["orpo"] = "orpo"
    beta: float = 0.1
    """Weight of the odds-ratio part (lambda in the paper)."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class CPO:
    """Contrastive preference optimization (Xu et al., 2024): DPO without a reference, and the
    chosen completion's negative log-likelihood."""

    type: Literal["cpo"] = "cpo"
    beta: float = 0.1
    """Scale of the summed log-probs."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round."""
    nll_weight: float = 1.0
    """Weight of the chosen completion's mean negative log-likelihood."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        _smoothing(self.label_smoothing)
        if self.nll_weight < 0:
            raise ConfigError(f"nll_weight={self.nll_weight} must be 0 or more")


PreferenceLoss = DPO | RobustDPO | IPO | SimPO | ORPO | CPO


ReferenceKind = Literal["stored", "adapter"]
"""Where the reference's log-probs come from: computed for every example before the first step, and
stored in `reference/` of the run; or from the model with its adapters off, in each step."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(TuneConfig):
    """What methods share whose policy is compared with a reference."""

    reference: ReferenceKind = "stored"
    """Where the reference's log-probs come from, for losses that have one."""
    reference_model: str | None = None
    """A Hugging Face directory or run to compare with; null: the policy as it starts."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-6))
    """Optimizer, schedule, clipping; adapters take ten times the learning rate and more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference != "adapter":
            return
        if self.lora is None:
            raise ConfigError(
                "reference=adapter looks past adapters, and there are none; set lora.rank, or use "
                "reference=stored"
            )
        if self.reference_model is not None:
            raise ConfigError(
                "reference=adapter takes the policy's own base as the reference; use "
                f"reference=stored with reference_model={self.reference_model}"
            )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(ReferenceConfig):
    """A run of `fornax tune dpo`: pairs of a better and a worse completion."""

    loss: PreferenceLoss = field(default_factory=DPO)
    """What is minimised."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_model is not None and not isinstance(self.loss, DPO | RobustDPO | IPO):
            raise ConfigError(
                f"loss.type={self.loss.type} has no reference, and reference_model="
                f"{self.reference_model} would not be read; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferenceConfig):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        if self.batch_size < 2:
            raise ConfigError(
                f"batch_size={self.batch_size}: the baseline is a mean over the batch; use 2 or "
                "more, better 16"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TuneConfig):
    """A run of `fornax tune reward`: a scalar head that ranks the better completion higher."""

    without_qat: ClassVar[str] = "fornax quantize writes no reward model"
    without_scheme: ClassVar[str] = "reward models are scored by products of floats"
    centre: float = 0.0
    """Weight of the squared sum of a pair's scores (Eisenstein et al., 2023): it draws their mean
    to 0, so that scores of different prompts can be compared; 0.01 is usual."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-5))
    """Optimizer, schedule, clipping; adapters take ten times the learning rate and more."""
    train_head_only: bool = False
    """Whether the decoder stays as it is, and only the head learns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centre < 0:
            raise ConfigError(f"centre={self.centre} must be 0 or more")
        if self.train_head_only and self.lora is not None:
            raise ConfigError("train_head_only trains no adapters; leave lora out")
