"""Server-sent events of an OpenAI stream, read into the times and counts of one request."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fornax.bench.connection import Exchange, error_message

__all__ = ["Outcome", "read_outcome"]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one request went. Times in seconds; an error is empty when it succeeded."""

    started: float
    """When it was sent, `time.perf_counter()`."""
    queued: float = 0.0
    """It waited so long for a place among the requests in flight."""
    first_token: float = 0.0
    """From sending to the first token's arrival (TTFT)."""
    gaps: list[float] = field(default_factory=list)
    """Between arrivals of consecutive pieces of text (ITL)."""
    latency: float = 0.0
    """From sending to the last token's arrival (E2EL)."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Mean time of a token after the first (TPOT); None with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)

    @property
    def arrivals(self) -> list[float]:
        """When each piece of text came, `time.perf_counter()`."""
        times = [self.started + self.first_token]
        for gap in self.gaps:
            times.append(times[-1] + gap)
        return times


def read_outcome(exchange: Exchange, *, prompt_tokens: int, queued: float = 0.0) -> Outcome:
    """Read an exchange whose answer is a stream of completions or chat completions.

    Args:
        prompt_tokens: the prompt's length, unless the answer's usage says another.
    """
    outcome = Outcome(started=exchange.started, queued=queued, prompt_tokens=prompt_tokens)
    if exchange.status != 200:
        outcome.error = f"status {exchange.status}: {error_message(exchange.body)}"
        return outcome
    last = None
    pieces: list[str] = []
    ended = False
    for time, data in _events(exchange.pieces):
        if data == b"[DONE]":
            ended = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            outcome.error = f"the stream has an event that is not JSON: {data[:200]!r}"
            return outcome
        if "error" in event:
            outcome.error = error_message(data)
            return outcome
        _read_usage(event, outcome)
        text = _text(event)
        if text is None:
            continue
        if last is None:
            outcome.first_token = time - exchange.started
        else:
            outcome.gaps.append(time - last)
        last = time
        pieces.append(text)
    if last is None or not ended:
        outcome.error = "the stream ended early" if last else "the stream has no token"
        return outcome
    outcome.latency = last - exchange.started
    outcome.text = "".join(pieces)
    outcome.output_tokens = outcome.output_tokens or len(pieces)
    return outcome


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Each event's data with the time at which its last byte came."""
    rest = b""
    for time, piece in pieces:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield time, b"\n".join(lines)


def _text(event: dict[str, Any]) -> str | None:
    """Text of an event that brings a token, which may be empty; None for any other event."""
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"]
    said = [delta.get(key) for key in ("reasoning_content", "reasoning", "content")]
    text = "".join(part for part in said if part)
    if text or delta.get("tool_calls"):
        return text
    return None if "role" in delta or choice.get("finish_reason") else ""


def _read_usage(event: dict[str, Any], outcome: Outcome) -> None:
    usage = event.get("usage")
    if usage:
        outcome.output_tokens = usage.get("completion_tokens") or 0
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
