"""What servers did in a capture: types of requests and batches; `serving.py` reads them."""

import dataclasses
from typing import Literal

__all__ = ["Ending", "Phase", "ServedBatch", "ServedRequest", "Serving"]

Ending = Literal["finished", "aborted", "failed", "open"]
Phase = Literal["queued", "prefill", "decode", "batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """One request; times are nanoseconds since the capture began, None outside of it.

    A model server says how long a request had waited, so that it may have come before the capture.
    """

    rank: int
    id: str
    model: str
    """Of a model server, "model/function"; empty for a request of the engine's."""
    queued: int | None
    """When it came."""
    started: int | None
    """When it first was in a batch."""
    first_token: int | None
    """When the engine had its first token; None for requests that want none."""
    ended: int | None
    ending: Ending
    """"open": it had not ended when the capture did."""
    prompt_tokens: int | None
    tokens: int | None
    """Sampled for it, over all its completions."""
    preempted: int
    """How often it lost its place in the cache."""

    @property
    def phases(self) -> dict[Phase, tuple[int, int]]:
        """Begin and end of each part of its way that lies in the capture whole: of the engine
        queued, prefill up to the first token, decode; of a model server queued and batch."""
        after: Phase = "batch" if self.model else "prefill"
        parts: dict[Phase, tuple[int | None, int | None]] = {
            "queued": (self.queued, self.started),
            after: (self.started, self.ended if self.first_token is None else self.first_token),
            "decode": (self.first_token, self.ended),
        }
        if after == "prefill" and self.first_token is None and self.tokens != 0:
            del parts["prefill"]  # its end is not in the capture
        return {
            phase: (begin, end)
            for phase, (begin, end) in parts.items()
            if begin is not None and end is not None
        }

    def seconds(self, phase: Phase) -> float | None:
        """Time in a part of its way; None where the capture does not hold all of it."""
        span = self.phases.get(phase)
        return None if span is None else (span[1] - span[0]) / 1e9

    @property
    def token_seconds(self) -> float | None:
        """Decoding over the tokens after the first; None where either is not known."""
        decode, tokens = self.seconds("decode"), self.tokens or 0
        return decode / (tokens - 1) if decode is not None and tokens > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedBatch:
    """What one call of the engine or one batch of a model server held."""

    rank: int
    kind: str
    """"forward" or "decode" of the engine; else "model/function"."""
    step: int | None
    """Number of the step in which it began; None outside of all."""
    begin: int
    """Nanoseconds since the capture began: of the engine, when the call was dispatched."""
    duration: int
    """Of dispatching; of a model server's batch, until its answers were there."""
    sequences: int
    """Sequences, or requests of a model server."""
    most_sequences: int | None
    """The engine's limit; None where there is none."""
    rows: int
    """Tokens of one step; rows of a model server."""
    places: int
    """What the program that ran computes: `rows` and padding."""
    most_rows: int | None
    """The limit of rows."""
    steps: int
    """Steps of the call; each computes `rows`."""

    @property
    def fill(self) -> float:
        """Share of what the program computed that was not padding."""
        return self.rows / self.places if self.places else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """All requests and batches that the capture holds anything of, by time."""

    requests: tuple[ServedRequest, ...] = ()
    batches: tuple[ServedBatch, ...] = ()
