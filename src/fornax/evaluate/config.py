"""What a user may say about an evaluation."""

from dataclasses import dataclass, field

from fornax.config.errors import ConfigError
from fornax.rewards import RewardSpec
from fornax.tune.rollout import SampleSettings

__all__ = ["EvaluateConfig"]


def _greedy() -> SampleSettings:
    return SampleSettings(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is measured: whatever `text`, `prompts` and `tasks` name.

    Raises `ConfigError` for combinations that make no sense.
    """

    model: str
    """A Hugging Face directory, its name on the Hub, or the directory of a run, of adapters too."""
    against: str | None = None
    """Another model, for a comparison on `prompts`."""
    template: str | None = None
    """A file with the chat template; null takes the model's own."""

    text: tuple[str, ...] = ()
    """Files for perplexity and bits per byte: plain text, one document per file, or JSON lines."""
    column: str = "text"
    """The column of JSON lines with the text."""
    context: int | None = None
    """Tokens that a prediction may see, with the predicted one; null: up to 1024, as the model
    allows."""
    stride: int | None = None
    """Tokens by which a window advances: each token but the first ones sees at least context -
    stride;
    null: half of context."""
    batch_size: int = 8
    """Windows scored at a time."""

    prompts: str | None = None
    """JSON lines with a `prompt`, text or messages, and the columns that rewards need."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of the columns where they are not the usual ones, such as prompt: question."""
    reward: tuple[str | RewardSpec, ...] = ()
    """What judges completions: FILE.py:NAME or a built-in verifier."""
    judge: str | None = None
    """The run of a reward model that judges completions."""
    sampling: SampleSettings = field(default_factory=_greedy)
    """How completions are drawn; greedy unless a temperature is given."""
    k: tuple[int, ...] = (1,)
    """The k of pass@k, each at most sampling.n."""
    threshold: float = 1.0
    """The total reward from which on a sample passes."""
    max_num_seqs: int = 32
    """Completions the engine works on at once, at most."""
    reward_workers: int | None = None
    """Processes that run rewards; null: one for each core, at most 4."""

    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval-harness, where it is installed."""
    task_paths: tuple[str, ...] = ()
    """Folders with tasks of your own."""
    shots: int | None = None
    """Examples before each question of a task; null: the task's own number."""
    limit: int | None = None
    """Only the first this many prompts, documents, or questions of a task."""

    seed: int = 0
    """Of samples and intervals."""
    confidence: float = 0.95
    """Of the intervals."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if not (self.text or self.prompts or self.tasks):
            raise ConfigError(
                "there is nothing to evaluate on; give text files (--text), prompts with rewards "
                "(--prompts, --reward) or tasks (--tasks)"
            )
        if self.prompts and not (self.reward or self.judge):
            raise ConfigError(
                f"nothing judges the completions of prompts={self.prompts}; give a reward "
                "(--reward) or a reward model (--judge)"
            )
        for name in ("reward", "judge", "against"):
            if getattr(self, name) and not self.prompts:
                raise ConfigError(f"{name} has no completions to judge; give --prompts FILE")
        if self.reward and self.judge:
            raise ConfigError("reward and judge both judge the completions; keep one of them")
        if self.against == self.model:
            raise ConfigError(f"against={self.against} is the model itself; name another one")
        if self.task_paths and not self.tasks:
            raise ConfigError("task_paths has no tasks; name them with --tasks")

    def _check_numbers(self) -> None:
        for name in ("batch_size", "max_num_seqs", "limit", "stride", "reward_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.context is not None and self.context < 2:
            raise ConfigError(f"context={self.context} must be 2 or more")
        if self.shots is not None and self.shots < 0:
            raise ConfigError(f"shots={self.shots} must be 0 or more")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence={self.confidence} must be between 0 and 1")
        if self.context and self.stride and self.stride >= self.context:
            raise ConfigError(f"stride={self.stride} must be below context={self.context}")
        for k in self.k:
            if not 1 <= k <= self.sampling.n:
                raise ConfigError(
                    f"k={k} needs k samples of each prompt and sampling.n={self.sampling.n}; raise "
                    "it, with a sampling.temperature above 0"
                )

    @property
    def rewards(self) -> tuple[RewardSpec, ...]:
        """The rewards with all that is left to its default."""
        return tuple(RewardSpec(function=r) if isinstance(r, str) else r for r in self.reward)
