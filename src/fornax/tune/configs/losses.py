"""The losses of `fornax tune dpo`: one dataclass each, with the defaults of its paper."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = ["CPO", "DPO", "IPO", "ORPO", "PreferenceLoss", "RobustDPO", "SimPO"]


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
        """Check the numbers."""
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
        """Check the numbers."""
        _positive(beta=self.beta)
        _smoothing(self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class IPO:
    """Identity preference optimization (Azar et al., 2023), on log-probs averaged over tokens."""

    type: Literal["ipo"] = "ipo"
    beta: float = 0.1
    """Strength of the regularisation (tau in the paper): margins are drawn to 1 / (2 beta)."""

    def __post_init__(self) -> None:
        """Check the numbers."""
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
        """Check the numbers."""
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
        """Check the numbers."""
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
        """Check the numbers."""
        _positive(beta=self.beta)
        _smoothing(self.label_smoothing)
        if self.nll_weight < 0:
            raise ConfigError(f"nll_weight={self.nll_weight} must be 0 or more")


PreferenceLoss = DPO | RobustDPO | IPO | SimPO | ORPO | CPO
