"""What a user may say about optimization: optimizers, clipping, groups, averages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.optim.averages import power_exponent
from fornax.optim.schedules import Constant, Cosine, Schedule

__all__ = [
    "EMA",
    "SGD",
    "SOAP",
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "AdaptiveClip",
    "Clip",
    "Group",
    "Lion",
    "Lookahead",
    "Muon",
    "NormClip",
    "OptimConfig",
    "Optimizer",
    "RMSProp",
    "Shampoo",
    "UserOptimizer",
    "ValueClip",
]

StateDtype = Literal["float32", "bfloat16"]


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value} must be greater than 0")


def _not_negative(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value} is negative; use 0 to switch it off")


def _decay_rates(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{name}={value} is not a decay rate; use a number in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (`optax.adamw`; Loshchilov and Hutter 2019)."""

    type: Literal["adamw"] = "adamw"
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decay per unit of learning rate."""
    nesterov: bool = False
    """Look ahead along the first moment."""
    mu_dtype: StateDtype | None = None
    """Type of the first moment; null keeps float32."""

    def __post_init__(self) -> None:
        _decay_rates(b1=self.b1, b2=self.b2)
        _positive(eps=self.eps)
        _not_negative(weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit:
    """AdamW whose moments of weight matrices are kept in 8 bits (Dettmers et al. 2022).

    Those of embeddings, the output head, norms, biases and small matrices stay float32.
    """

    type: Literal["adamw8bit"] = "adamw8bit"
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decay per unit of learning rate."""

    def __post_init__(self) -> None:
        _decay_rates(b1=self.b1, b2=self.b2)
        _positive(eps=self.eps)
        _not_negative(weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Lion:
    """The sign of an interpolated momentum (`optax.lion`; Chen et al. 2023)."""

    type: Literal["lion"] = "lion"
    b1: float = 0.9
    """Weight of the momentum in the update."""
    b2: float = 0.99
    """Decay rate of the momentum."""
    weight_decay: float = 1.0
    """Decay per unit of learning rate; Lion needs about ten times AdamW's at a tenth its rate."""
    mu_dtype: StateDtype | None = None
    """Type of the momentum; null keeps float32."""

    def __post_init__(self) -> None:
        _decay_rates(b1=self.b1, b2=self.b2)
        _not_negative(weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Second moments kept as rows and columns (`optax.adafactor`; Shazeer and Stern 2018)."""

    type: Literal["adafactor"] = "adafactor"
    min_dim_size_to_factor: int = 128
    """A matrix is factored when both its sides have at least this size."""
    decay_rate: float = 0.8
    """Exponent of the schedule of the second moment's decay."""
    clipping_threshold: float | None = 1.0
    """Largest root mean square of an update of one matrix; null switches it off."""
    multiply_by_parameter_scale: bool = True
    """Multiply the update by the root mean square of the parameter."""
    momentum: float | None = None
    """Decay rate of a first moment; null keeps none."""
    weight_decay_rate: float = 0.0
    """Decay per update, NOT multiplied by the learning rate, as Optax has it."""
    eps: float = 1e-30
    """Added to the squared gradient."""

    def __post_init__(self) -> None:
        _positive(
            min_dim_size_to_factor=self.min_dim_size_to_factor,
            decay_rate=self.decay_rate,
            clipping_threshold=self.clipping_threshold,
            eps=self.eps,
        )
        _decay_rates(momentum=self.momentum)
        _not_negative(weight_decay_rate=self.weight_decay_rate)


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Orthogonalized momentum for weight matrices (Jordan et al. 2024).

    Embeddings, the output head, norms and biases go to `fallback`.
    """

    type: Literal["muon"] = "muon"
    beta: float = 0.95
    """Decay rate of the momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_coeffs: Literal["standard", "dion"] = "standard"
    """Coefficients of the iteration: Jordan's, or the five steps of Dion."""
    ns_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of what the iterations multiply; they add up in float32 either way. bfloat16 changes an
    update by about one part in a hundred, and processors with units for it are several times as
    fast."""
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius"
    """How a matrix is scaled before the iteration."""
    nesterov: bool = True
    """Look ahead along the momentum."""
    adaptive: bool = False
    """Scale the update by its dual norm."""
    consistent_rms: float | None = 0.2
    """Root mean square of an update; 0.2 lets AdamW's learning rate serve; null scales by
    sqrt(max(1, outputs / inputs)) instead."""
    eps: float = 1e-8
    """Added to the norm that divides the momentum."""
    weight_decay: float = 0.1
    """Decay per unit of learning rate."""
    mu_dtype: StateDtype | None = None
    """Type of the momentum; null keeps float32."""
    fallback: AdamW = AdamW()
    """What updates the parameters that are not weight matrices."""
    fallback_learning_rate_factor: float = 1.0
    """Learning rate of the fallback, as a multiple of Muon's."""

    def __post_init__(self) -> None:
        _decay_rates(beta=self.beta)
        _positive(
            ns_steps=self.ns_steps,
            eps=self.eps,
            consistent_rms=self.consistent_rms,
            fallback_learning_rate_factor=self.fallback_learning_rate_factor,
        )
        _not_negative(weight_decay=self.weight_decay)
        if self.ns_coeffs == "dion" and self.ns_steps > 5:
            raise ConfigError(
                f"ns_coeffs=dion has coefficients for five steps, not ns_steps={self.ns_steps}; "
                "use 5 or fewer, or ns_coeffs=standard"
            )


@dataclass(frozen=True, kw_only=True)
class SOAP:
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024).

    Embeddings, the output head, norms and biases go to `fallback`.
    """

    type: Literal["soap"] = "soap"
    b1: float = 0.95
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment, kept in the eigenbasis."""
    shampoo_beta: float | None = None
    """Decay rate of the preconditioner; null takes `b2`."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    precondition_frequency: int = 10
    """Updates between two refinements of the eigenbasis."""
    max_precondition_dim: int = 8192
    """A side longer than this keeps the identity as its basis."""
    weight_decay: float = 0.1
    """Decay per unit of learning rate."""
    fallback: AdamW = AdamW()
    """What updates the parameters that are not weight matrices."""
    fallback_learning_rate_factor: float = 1.0
    """Learning rate of the fallback, as a multiple of SOAP's."""

    def __post_init__(self) -> None:
        _decay_rates(b1=self.b1, b2=self.b2, shampoo_beta=self.shampoo_beta)
        _positive(
            eps=self.eps,
            precondition_frequency=self.precondition_frequency,
            max_precondition_dim=self.max_precondition_dim,
            fallback_learning_rate_factor=self.fallback_learning_rate_factor,
        )
        _not_negative(weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Shampoo:
    """Gradients between inverse fourth roots of their second moments (Anil et al. 2020).

    Embeddings, the output head, norms and biases go to `fallback`.
    """

    type: Literal["shampoo"] = "shampoo"
    b1: float = 0.9
    """Decay rate of the momentum."""
    b2: float = 0.99
    """Decay rate of the second moments, of the grafted optimizer's too."""
    eps: float = 1e-8
    """Added to the square root of the grafted optimizer's second moment."""
    matrix_eps: float = 1e-6
    """Added to the eigenvalues that are inverted, as a share of the largest."""
    block_size: int = 1024
    """Longest side of a block that has preconditioners of its own."""
    root_interval: int = 10
    """Updates between two computations of the inverse roots."""
    start_step: int = 10
    """Updates that the grafted optimizer makes before the first roots."""
    grafting: Literal["rmsprop", "adagrad", "sgd"] = "rmsprop"
    """Whose update gives each matrix's update its norm."""
    weight_decay: float = 0.1
    """Decay per unit of learning rate."""
    fallback: AdamW = AdamW()
    """What updates the parameters that are not weight matrices."""
    fallback_learning_rate_factor: float = 1.0
    """Learning rate of the fallback, as a multiple of Shampoo's."""

    def __post_init__(self) -> None:
        _decay_rates(b1=self.b1, b2=self.b2)
        _positive(
            eps=self.eps,
            matrix_eps=self.matrix_eps,
            block_size=self.block_size,
            root_interval=self.root_interval,
            fallback_learning_rate_factor=self.fallback_learning_rate_factor,
        )
        _not_negative(weight_decay=self.weight_decay, start_step=self.start_step)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum (`optax.sgd`)."""

    type: Literal["sgd"] = "sgd"
    momentum: float | None = 0.9
    """Decay rate of the momentum; null keeps none."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    weight_decay: float = 0.0
    """Added to the gradient as weight_decay * parameter, before the momentum."""

    def __post_init__(self) -> None:
        _decay_rates(momentum=self.momentum)
        _not_negative(weight_decay=self.weight_decay)
        if self.nesterov and self.momentum is None:
            raise ConfigError("nesterov=true needs a momentum; set momentum or drop nesterov")


@dataclass(frozen=True, kw_only=True)
class RMSProp:
    """Gradient over the root of its running square (`optax.rmsprop`)."""

    type: Literal["rmsprop"] = "rmsprop"
    decay: float = 0.9
    """Decay rate of the running square."""
    eps: float = 1e-8
    """Keeps the denominator from zero."""
    centered: bool = False
    """Subtract the squared running mean."""
    momentum: float | None = None
    """Decay rate of a momentum; null keeps none."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    weight_decay: float = 0.0
    """Added to the gradient as weight_decay * parameter, before the scaling."""

    def __post_init__(self) -> None:
        _decay_rates(decay=self.decay, momentum=self.momentum)
        _positive(eps=self.eps)
        _not_negative(weight_decay=self.weight_decay)
        if self.nesterov and self.momentum is None:
            raise ConfigError("nesterov=true needs a momentum; set momentum or drop nesterov")


@dataclass(frozen=True, kw_only=True)
class UserOptimizer:
    """A factory of the user's own, called with the learning rate and the keys beside `type`.

    See `fornax.optim.user` for what it is given.
    """

    type: str
    """FILE.py:NAME or package.module:NAME of a function that returns an
    `optax.GradientTransformation`, such as `optax:adabelief`."""
    options: Mapping[str, object] = field(default_factory=dict, metadata={"rest": True})
    """Keyword arguments for the factory."""

    def __post_init__(self) -> None:
        if not all(self.type.rpartition(":")[::2]):
            raise ConfigError(f"type={self.type} names no function; write FILE.py:NAME")

    def __hash__(self) -> int:
        return hash((self.type, tuple(sorted(self.options))))


Optimizer = (
    AdamW | AdamW8bit | Lion | Adafactor | Muon | SOAP | Shampoo | SGD | RMSProp | UserOptimizer
)
"""The rule that turns gradients into updates."""


@dataclass(frozen=True, kw_only=True)
class NormClip:
    """Scale all gradients down to a global norm (`optax.clip_by_global_norm`)."""

    type: Literal["global_norm"] = "global_norm"
    max_norm: float = 1.0
    """Largest norm over all trained parameters together."""

    def __post_init__(self) -> None:
        _positive(max_norm=self.max_norm)


@dataclass(frozen=True, kw_only=True)
class ValueClip:
    """Clip each gradient entry (`optax.clip`)."""

    type: Literal["value"] = "value"
    max_value: float = 1.0
    """Largest absolute value of an entry."""

    def __post_init__(self) -> None:
        _positive(max_value=self.max_value)


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Clip each output unit by its weights' norm (`optax.adaptive_grad_clip`; Brock 2021)."""

    type: Literal["adaptive"] = "adaptive"
    clipping: float = 0.01
    """Largest ratio of a unit's gradient norm to its parameter norm."""
    eps: float = 1e-3
    """Least parameter norm, so that zero-initialised parameters can leave zero."""

    def __post_init__(self) -> None:
        _positive(clipping=self.clipping, eps=self.eps)


Clip = NormClip | ValueClip | AdaptiveClip
"""One clipping of the gradients."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Other settings for the parameters whose path a pattern finds."""

    pattern: str
    """Regular expression searched in paths such as `layers/attention/q/kernel`."""
    learning_rate_factor: float = 1.0
    """Multiple of the schedule's learning rate."""
    optimizer: Optimizer | None = None
    """Optimizer of these parameters; null takes the run's."""
    freeze: bool = False
    """Leave these parameters as they are; they count for no gradient norm either."""

    def __post_init__(self) -> None:
        _positive(learning_rate_factor=self.learning_rate_factor)
        if self.freeze and (self.optimizer is not None or self.learning_rate_factor != 1.0):
            raise ConfigError(
                f"group {self.pattern!r} is frozen, so its optimizer and learning_rate_factor "
                "would never act; drop them, or freeze"
            )


@dataclass(frozen=True, kw_only=True)
class Lookahead:
    """Slow weights that follow fast ones (`optax.lookahead`; Zhang et al. 2019)."""

    sync_period: int = 5
    """Fast updates between two slow ones."""
    slow_step_size: float = 0.5
    """How far the slow weights go towards the fast ones."""
    reset_state: bool = False
    """Reset the fast optimizer's state after each slow update."""

    def __post_init__(self) -> None:
        _positive(sync_period=self.sync_period)
        if not 0 < self.slow_step_size <= 1:
            raise ConfigError(f"slow_step_size={self.slow_step_size} must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class EMA:
    """A running average of the parameters, for evaluation and export."""

    decay: float = 0.999
    """Weight of the old average at each update."""
    debias: bool = False
    """Start the average at zero and divide by 1 - decay^t, instead of starting it at the
    initial parameters."""
    warmup: bool = False
    """Decay by min(decay, (1 + n) / (10 + n)) at update n, so that a short run's average forgets
    the initial parameters."""
    widths: tuple[float, ...] = ()
    """Further averages, whose weights are powers of the step, by their relative widths, such as
    0.05 and 0.1: `fornax.optim.averages.reconstruct` makes one of any length of those that
    checkpoints hold (Karras et al. 2024)."""

    def __post_init__(self) -> None:
        _decay_rates(decay=self.decay)
        if self.debias and self.warmup:
            raise ConfigError(
                "ema.debias and ema.warmup both correct the start of the average; keep one of them"
            )
        for width in self.widths:
            power_exponent(width)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """A whole optimization chain: clip, optimize by group, average."""

    optimizer: Optimizer | None = field(default_factory=AdamW)
    """Optimizer of every parameter that no group treats otherwise; null when groups name one
    for each parameter."""
    learning_rate: float = 3e-4
    """Peak of the schedule."""
    schedule: Schedule = field(default_factory=Cosine)
    """Shape of the learning rate over the run."""
    clip: tuple[Clip, ...] = (NormClip(),)
    """Clippings of the gradients, in order."""
    groups: tuple[Group, ...] = ()
    """Per-group rules; the first whose pattern matches a parameter wins."""
    decay: tuple[str, ...] | None = None
    """Patterns of the parameters that decay; null decays every matrix (embeddings too) and no
    norm, bias or other vector, however many layers are stacked in it."""
    no_decay: tuple[str, ...] = ()
    """Patterns of parameters that do not decay, taken from those above."""
    accumulate: int = 1
    """Calls whose gradients are averaged into one update (`optax.MultiSteps`)."""
    lookahead: Lookahead | None = None
    """Keep slow weights, or null."""
    ema: EMA | None = None
    """Keep an average of the parameters, or null."""

    def __post_init__(self) -> None:
        _positive(learning_rate=self.learning_rate, accumulate=self.accumulate)
        if self.learning_rate == math.inf:
            raise ConfigError("learning_rate=inf must be finite; 1e-5 to 1e-2 is usual")
        if self.lookahead is not None and self.ema is not None:
            raise ConfigError(
                "lookahead and ema both claim the parameters to evaluate; keep one of them"
            )
        if self.optimizer is None and not self.groups:
            raise ConfigError("optimizer is null and there are no groups; name an optimizer")
        flat = isinstance(self.schedule, Constant) and self.schedule.warmup_steps == 0
        if self.lookahead is not None and self.lookahead.reset_state and not flat:
            raise ConfigError(
                "lookahead.reset_state also resets the optimizer's step count, so the "
                f"{self.schedule.type} schedule would start over every "
                f"{self.lookahead.sync_period} updates; use schedule constant without warmup, or "
                "reset_state false"
            )
