"""What the server tells whoever watches it: metrics, logs and traces hang themselves in here.

Everything is called in the event loop's thread. Nobody listening costs one truth test.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from fornax.config.errors import ServingCode
from fornax.serving.types import InferRequest, InferResult

__all__ = ["BatchRun", "Events", "Refusal", "StateChange"]


@dataclasses.dataclass(frozen=True, slots=True)
class StateChange:
    """A version of a model entered a state."""

    name: str
    version: str
    state: str
    """LOADING, READY, UNLOADING or UNAVAILABLE."""
    reason: str = ""
    """Why it is unavailable."""
    seconds: float = 0.0
    """What it took to come here, where it is known."""
    detail: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Figures worth a line: bytes of weights, programs compiled."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch that was executed. Times in nanoseconds."""

    name: str
    version: str
    function: str
    dims: Mapping[str, int]
    """The bucket's."""
    rows: int
    """Rows of requests in it; the rest of the bucket is padding."""
    requests: int
    queue: int
    """The longest wait among its requests."""
    compute_input: int
    compute_infer: int
    compute_output: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A request that a protocol refused before any model saw it."""

    protocol: str
    """`http` or `grpc`."""
    code: ServingCode
    message: str
    model: str = ""
    id: str = ""


Outcome = InferResult | BaseException


class Events:
    """The listeners, and how many requests were refused before a model saw them."""

    __slots__ = ("batches", "finished", "refusals", "refused", "states")

    def __init__(self) -> None:
        self.finished: list[Callable[[InferRequest, Outcome], None]] = []
        """Told of each request that a model was asked for, with its answer or its error."""
        self.batches: list[Callable[[BatchRun], None]] = []
        self.states: list[Callable[[StateChange], None]] = []
        self.refused: list[Callable[[Refusal], None]] = []
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By protocol and code."""

    def tell_finished(self, request: InferRequest, outcome: Outcome) -> None:
        """A request has its answer or its error."""
        for listener in self.finished:
            listener(request, outcome)

    def tell_batch(self, batch: BatchRun) -> None:
        """A batch was executed; ask `batches` first, so as to build nothing for nobody."""
        for listener in self.batches:
            listener(batch)

    def tell_state(self, change: StateChange) -> None:
        """A version entered a state."""
        for listener in self.states:
            listener(change)

    def tell_refused(
        self,
        protocol: str,
        code: ServingCode,
        message: str,
        model: str = "",
        id: str = "",  # noqa: A002
    ) -> None:
        """A protocol refused a request: a bad body, a missing token, too much."""
        self.refusals[protocol, code.name] += 1
        if self.refused:
            refusal = Refusal(protocol, code, message, model, id)
            for listener in self.refused:
                listener(refusal)
