"""Options of distillation: `fornax tune distill`."""

from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.config.spikes import refuse_rewinds
from fornax.mesh import MeshConfig, check_use
from fornax.optim import OptimConfig
from fornax.tune.config.base import TuneConfig, recipe
from fornax.tune.losses import Divergence, Tail

__all__ = ["DistillConfig", "FullLogits", "OnPolicy", "TeacherLogits", "TopLogits"]


@dataclass(frozen=True, kw_only=True)
class FullLogits:
    """The teacher runs beside the student, and every logit counts."""

    type: Literal["full"] = "full"


@dataclass(frozen=True, kw_only=True)
class TopLogits:
    """The teacher's most likely tokens at each position, from disk: written by one pass of the
    teacher where `path` does not hold them yet, read by training without the teacher."""

    type: Literal["top_k"] = "top_k"
    path: str = ""
    """The folder that holds them; empty for `teacher_logits/` of the run."""
    k: int = 64
    """Tokens kept at each position: 8 bytes each."""
    tail: Tail = "bucket"
    """What becomes of the probability outside them: one bucket for both sides; both sides scaled
    to sum to one inside; or left out of the sum."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"k={self.k} must be 1 or more, such as 64")


TeacherLogits = FullLogits | TopLogits


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Train on the student's own completions (generalised knowledge distillation, Agarwal et al.
    2023): at inference it meets its own mistakes, not the data's text."""

    share: float = 0.5
    """Share of steps whose completions the student draws; the others take the data's."""
    max_tokens: int = 128
    """Tokens of a drawn completion at most."""
    temperature: float = 1.0
    """Temperature at which the student draws."""
    shards: int | None = None
    """Parts in which a step's prompts are drawn, each in one engine by itself: bits depend on it,
    and not on how many samplers there are. null takes all together, with samplers of their own 8
    parts."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share} must lie in (0, 1]; leave on_policy out for 0")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} must be 1 or more")
        if self.shards is not None and self.shards < 1:
            raise ConfigError(f"shards={self.shards} must be 1 or more, or null")
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature} must be above 0")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TuneConfig):
    """A run of `fornax tune distill`; `model` is the student."""

    teacher: str | None = None
    """The teacher: a Hugging Face directory or run directory. Its tokenizer must be the student's;
    its shape need not be. Null only where stored logits are there."""
    teacher_mesh: MeshConfig | None = None
    """How devices share the teacher; null: as the student."""
    divergence: Divergence = "forward_kl"
    """What is minimised."""
    beta: float = 0.5
    """Weight of the teacher in the mixture of `jensen_shannon`."""
    temperature: float = 1.0
    """Divides both models' logits: above 1, what the teacher finds unlikely counts for more."""
    hard_weight: float = 0.0
    """Weight of the data's own next token (cross entropy), added to the divergence."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens count: what the assistant wrote (in plain text, everything), or every token."""
    packing: Literal["best_fit", "none"] | None = None
    """Whether several examples share a row, each blind to the others; null packs, but not stored
    logits and drawn completions, whose examples have rows of their own."""
    logits: TeacherLogits = field(default_factory=FullLogits)
    """Where the teacher's logits come from."""
    on_policy: OnPolicy | None = None
    """Completions drawn by the student, or null."""
    optim: OptimConfig = field(default_factory=lambda: recipe(2e-5))
    """Optimizer, schedule, clipping; adapters take ten times the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_mesh is not None:
            check_use(self.teacher_mesh, "tune")
        for key, value in (("qat", self.quant.qat), ("scheme", self.quant.scheme)):
            if self.on_policy is not None and value is not None:
                raise ConfigError(
                    f"quant.{key}={value} and on_policy do not go together: completions are drawn "
                    "by float weights and products; leave one of them out"
                )
        if self.on_policy is not None:
            refuse_rewinds(self.spikes, "on-policy distillation")
        if not 0 < self.beta < 1:
            raise ConfigError(
                f"beta={self.beta} must lie in (0, 1); its ends are divergence=forward_kl and "
                "divergence=reverse_kl"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature} must be above 0")
        if self.hard_weight < 0:
            raise ConfigError(f"hard_weight={self.hard_weight} must be 0 or more")
        if self.teacher is None and not isinstance(self.logits, TopLogits):
            raise ConfigError(
                "distillation needs a teacher; name one with --teacher, or stored logits with "
                "--logits.type top_k --logits.path DIR"
            )
        if self.packing == "best_fit" and not self.packs:
            raise ConfigError(
                "stored logits and on_policy need a row for each example; leave packing out"
            )
        if self.on_policy is not None and isinstance(self.logits, TopLogits):
            raise ConfigError(
                "on_policy asks the teacher about completions that are not drawn yet, which stored "
                "logits cannot answer; use logits.type=full"
            )

    @property
    def packs(self) -> bool:
        """Whether examples share rows."""
        alone = self.on_policy is not None or isinstance(self.logits, TopLogits)
        return self.packing != "none" and not alone
