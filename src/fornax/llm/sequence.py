"""One completion in the making: its tokens, how far the model got with them, and its pages."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["HeldState", "Sequence", "Status"]


class Status(enum.Enum):
    """Where a sequence is. Only the scheduler changes it."""

    WAITING = "waiting"
    """Not begun; a child waits here until its parent's prompt is computed."""
    RUNNING = "running"
    """Has a row and pages."""
    PREEMPTED = "preempted"
    """Lost its row and pages, waits to be computed again."""
    FINISHED = "finished"
    """Over: ended, aborted or failed."""


class HeldState(NamedTuple):
    """A slot with a copy of a sequence's state, until all tokens that it is of are known."""

    slot: int
    num_pages: int
    """Whole pages of tokens that it is of."""
    decodes: bool
    """Whether the sequence decodes: its next state takes the place of this one."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of one request.

    The host knows `tokens`; `num_pending` more are sampled on the device, or will be by a step
    that is already planned. Of all these the model has been given the first `num_computed`, again
    counting planned steps. All fields after `children` belong to the scheduler.
    """

    id: int
    """Unique, and increasing with the order of arrival."""
    request_id: str
    prompt: list[int]
    """Prompt tokens; never changed."""
    max_len: int
    """Most tokens it may reach, the prompt included."""
    priority: int = 0
    """Smaller goes first, under the policy "priority"."""
    arrival: float = 0.0
    """When the request came, in seconds of any clock that all requests share."""
    salt: bytes = b""
    """Pages are shared only between sequences of one salt: adapter and its version, user's salt."""
    lora: str | None = None
    """Adapter; at most `max_loras` different ones run at once."""
    reads_cache: bool = True
    """False when every prompt token has to be computed, as prompt logprobs need."""
    pooling: bool = False
    """Computed once and never sampled: an embedding."""
    children: list["Sequence"] = field(default_factory=list)
    """With n > 1: further completions, forked off when the prompt is computed; then emptied."""
    drafts: list[int] = field(default_factory=list)
    """Proposed next tokens, set by the engine while nothing is pending; cut by `schedule` to those
    that are tried, emptied by `received`. Until then the sequence is in no other step."""
    tokens: list[int] = field(init=False)
    """Prompt and output, as far as the host knows them; only `Scheduler.received` appends."""
    num_prompt: int = field(init=False)
    status: Status = field(init=False, default=Status.WAITING)
    row: int | None = field(init=False, default=None)
    """Slot in the device's per-sequence arrays while it runs."""
    num_computed: int = field(init=False, default=0)
    num_pending: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)
    """Prompt tokens found in the prefix cache when it first ran."""
    pages: list[list[int]] = field(init=False, default_factory=list)
    """For each page group the pages of its tokens in order; 0 where no future query can see."""
    first_live: list[int] = field(init=False, default_factory=list)
    """For each page group the index of the first page that is not 0."""
    page_digests: list[bytes] = field(init=False, default_factory=list)
    """Chained digests of its full pages, made on demand."""
    num_registered: int = field(init=False, default=0)
    """Of its pages, how many are registered in the prefix cache."""
    num_shared: int = field(init=False, default=0)
    """Tokens of which pages were there when it was admitted, also where no state was kept."""
    state: int = field(init=False, default=0)
    """Which of its row's states is the one after `num_computed` tokens."""
    held_state: HeldState | None = field(init=False, default=None)
    decode_state: bytes | None = field(init=False, default=None)
    """Digest of the last page that a state was kept after while it decoded."""
    order: tuple[float, float, int] = field(init=False, default=(0.0, 0.0, 0))
    """Place in every queue: smaller runs sooner and is preempted later."""
    began: bool = field(init=False, default=False)
    """Whether it ever ran."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_prompt = len(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens sampled so far and known to the host."""
        return self.tokens[self.num_prompt :]

    @property
    def length(self) -> int:
        """Tokens, pending ones included."""
        return len(self.tokens) + self.num_pending

    @property
    def remaining(self) -> int:
        """Tokens that the model has not been given: 1 while it decodes."""
        return len(self.tokens) + self.num_pending - self.num_computed
