"""What happens in the server, for those who listen: metrics, logs and traces.

Everything is called in the event loop's thread. Nobody listening costs one truth test.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

from fornax.config.errors import ServingCode
from fornax.serving.types import InferRequest, InferResult

__all__ = ["Events", "Refusal", "StateChange"]


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


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A request that a protocol refused before any model saw it."""

    protocol: str
    """`http` or `grpc`."""
    code: ServingCode
    message: str
    model: str = ""
    id: str = ""
    request_id: str = ""


Outcome = InferResult | BaseException


class Events:
    """The listeners, and how many requests were refused before a model saw them."""

    __slots__ = ("finished", "refusals", "refused", "states")

    def __init__(self) -> None:
        self.finished: list[Callable[[InferRequest, Outcome], None]] = []
        """Told of each request that a model was asked for, with its answer or its error."""
        self.states: list[Callable[[StateChange], None]] = []
        self.refused: list[Callable[[Refusal], None]] = []
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By protocol and code."""

    def tell_finished(self, request: InferRequest, outcome: Outcome) -> None:
        """A request has its answer or its error."""
        for listener in self.finished:
            listener(request, outcome)

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
        request_id: str = "",
    ) -> None:
        """A protocol refused a request: a bad body, a missing token, too much."""
        self.refusals[protocol, code.name] += 1
        if self.refused:
            refusal = Refusal(protocol, code, message, model, id, request_id)
            for listener in self.refused:
                listener(refusal)
