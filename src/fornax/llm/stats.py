"""What the engine measures, handed to an observer: the server's metrics, a benchmark, a test."""

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Observer", "Readiness", "RequestStats", "StepStats"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far the engine is with compiling its steps."""

    done: int
    """Programs compiled."""
    total: int
    """Programs to compile before it is ready."""
    seconds_left: float | None
    """Estimate from those done; None before the first."""

    @property
    def ready(self) -> bool:
        """Whether every program is compiled."""
        return self.done >= self.total


@dataclass(slots=True)
class StepStats:
    """One call of the engine's programs; counts are of this call unless said otherwise."""

    seconds: float = 0.0
    """From the previous call's end to this one's, while work was there."""
    steps: int = 1
    """Steps of the call: several where it does nothing but decode."""
    running: int = 0
    """Sequences running now."""
    waiting: int = 0
    """Sequences waiting now."""
    cache_usage: float = 0.0
    """Share of the cache's pages in use now, 0 to 1."""
    bucket: int = 0
    """Tokens that the compiled step was made for."""
    tokens: int = 0
    """Tokens that each step was given; the rest was padding."""
    prompt_tokens: int = 0
    """Of these, prompt tokens computed."""
    generation_tokens: int = 0
    """Tokens sampled and kept."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of these, tokens found."""
    preemptions: int = 0
    """Sequences pushed out of the cache."""
    drafts: int = 0
    """Times that tokens were proposed for a sequence."""
    draft_tokens: int = 0
    """Tokens proposed."""
    accepted_tokens: int = 0
    """Of these, tokens accepted."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Accepted tokens by place in the proposal."""
    running_loras: tuple[str, ...] = ()
    """Adapters with running sequences."""
    waiting_loras: tuple[str, ...] = ()
    """Adapters with waiting sequences."""
    compiled: tuple[str, ...] = ()
    """Programs compiled although the engine was ready: a fault, each named."""

    def count_drafts(self, drafts: int, accepted: int) -> None:
        """Count the drafts of one sequence, and how many of them were accepted."""
        self.drafts += 1
        self.draft_tokens += drafts
        self.accepted_tokens += accepted
        per_position = self.accepted_per_position
        per_position.extend([0] * (drafts - len(per_position)))
        for position in range(accepted):
            per_position[position] += 1


@dataclass(slots=True)
class RequestStats:
    """One finished request. Times are `time.monotonic()` seconds; 0 when it never got there."""

    request_id: str
    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    """Over all completions."""
    finish_reasons: list[str] = field(default_factory=list)
    """One per completion: stop, length, abort."""
    n: int = 1
    max_tokens: int | None = None


class Observer(Protocol):
    """Called from the engine's thread; must be quick and must not raise."""

    def step(self, stats: StepStats) -> None:
        """A step was processed."""

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival."""

    def inter_token(self, seconds: float) -> None:
        """A sequence's token came `seconds` after its previous one."""

    def finished(self, stats: RequestStats) -> None:
        """A request ended, aborted ones included."""
