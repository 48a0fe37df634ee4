"""How much one request may ask for, and how many are answered at once.

What a limit counts is what the work grows with: so lengths are multiplied by the prompts, or by the
completions, that each is handled for.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic_core import to_json

from fornax.config import ConfigError
from fornax.llm.server.errors import ApiError

__all__ = ["ConcurrencyLimit", "RefusalPace", "RequestLimits"]


@dataclass(slots=True)
class ConcurrencyLimit:
    """How many requests are being answered, and how fast they finish."""

    limit: int
    """Requests at once; more are refused."""
    running: int = 0
    finishes: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it runs; 429 when there are too many."""
        if self.running >= self.limit:
            raise self.refusal(f"{self.running} requests are being answered", 1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.finishes.append(time.monotonic())

    def refusal(self, why: str, ahead: int) -> ApiError:
        """429, with the time until about `ahead` requests will have finished."""
        seconds = 1.0
        if len(self.finishes) > 1:
            span = self.finishes[-1] - self.finishes[0]
            seconds = min(60.0, max(1.0, ahead * span / (len(self.finishes) - 1)))
        return ApiError(
            429,
            f"{why}, which is all this server takes; try again later",
            code="rate_limit_exceeded",
            retry_after=seconds,
        )


@dataclass(slots=True, kw_only=True)
class RefusalPace:
    """Spaces out the answers to requests that are refused.

    Who is refused at once may ask again at once, and reading what is refused takes the processor
    from those who are served.
    """

    burst: int = 8
    """Refusals that need not wait."""
    per_second: float = 20.0
    """Of further ones, how many are answered."""
    longest: float = 1.0
    """Seconds that one waits at most."""
    _next: float = 0.0

    async def wait(self) -> None:
        """Return when a refusal may be answered."""
        now = time.monotonic()
        earliest = now - self.burst / self.per_second
        self._next = min(max(self._next, earliest) + 1 / self.per_second, now + self.longest)
        if self._next > now:
            await asyncio.sleep(self._next - now)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """How much one request may ask for; more gets 400."""

    max_body_values: int = 131072
    """Values in the JSON, counted by its commas before it is read; or twice the context's tokens,
    where that is more."""
    max_messages: int = 2048
    """Messages of a chat."""
    max_completions: int = 1024
    """Prompts times n."""
    max_prompt_tokens: int = 4 * 1024 * 1024
    """Tokens of the prompts, times n."""
    max_stop_characters: int = 4096
    """Characters of all stop strings, times the prompts."""
    max_bad_word_characters: int = 16384
    """Characters of all bad_words, times the prompts."""
    max_token_ids: int = 16384
    """Ids in stop_token_ids, allowed_token_ids, logit_bias; of each, times the prompts."""
    max_structured_characters: int = 65536
    """Characters of response_format, structured_outputs, or tools, as JSON; of each."""
    max_structured_total: int = 1024 * 1024
    """The same, times the prompts."""
    max_repetition_pattern: int = 65536
    """max_pattern_size of repetition_detection, times the completions."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value < 1:
                raise ConfigError(f"{limit.name}={value} is below 1; give at least 1")

    def check_json(self, json: bytes, context: int) -> None:
        """Refuse a body of too many values, which reading it would hold every thread for.

        Args:
            json: the body; commas in its texts count too.
            context: tokens that a prompt may have, each a value.

        Raises:
            ApiError: 400 with how many it has and may have.
        """
        values, most = json.count(b",") + 1, max(self.max_body_values, 2 * context)
        if values > most:
            raise ApiError(
                400,
                f"the body has {values} values by its commas; this server takes {most} "
                "(max_body_values): send less in one request",
            )

    def check(self, body: Any, prompts: int) -> None:
        """Refuse a body that asks for too much.

        Args:
            body: of a completion or a chat, or `SamplingParams`.
            prompts: how many it has.

        Raises:
            ApiError: 400 with the field, its size, and what is allowed.
        """
        completions = prompts * (body.n or 1)
        _check_limit("n", "max_completions", completions, self.max_completions, "completions")
        size = _characters(body.stop) * prompts
        _check_limit("stop", "max_stop_characters", size, self.max_stop_characters, "characters")
        size, most = _characters(body.bad_words) * prompts, self.max_bad_word_characters
        _check_limit("bad_words", "max_bad_word_characters", size, most, "characters")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            size = len(getattr(body, name) or ()) * prompts
            _check_limit(name, "max_token_ids", size, self.max_token_ids, "token ids")
        for name in ("response_format", "structured_outputs", "tools"):
            self._check_structured(name, getattr(body, name, None), prompts)
        if body.repetition_detection is not None:
            size = body.repetition_detection.max_pattern_size * completions
            limit, most = "max_repetition_pattern", self.max_repetition_pattern
            _check_limit("repetition_detection", limit, size, most, "tokens")

    def check_messages(self, count: int) -> None:
        """Refuse a chat of too many messages; raises `ApiError`."""
        if count > self.max_messages:
            raise ApiError(
                400,
                f"the chat has {count} messages; this server takes {self.max_messages} "
                "(max_messages): leave out the oldest",
                param="messages",
            )

    def check_prompts(self, tokens: int, n: int) -> None:
        """Refuse prompts of too many tokens in all; raises `ApiError`."""
        limit = "max_prompt_tokens"
        _check_limit("n", limit, tokens * n, self.max_prompt_tokens, "prompt tokens")

    def _check_structured(self, name: str, value: object, prompts: int) -> None:
        if not value:
            return
        size = len(to_json(value, exclude_none=True))
        limit = "max_structured_characters"
        _check_limit(name, limit, size, self.max_structured_characters, "characters")
        limit = "max_structured_total"
        _check_limit(name, limit, size * prompts, self.max_structured_total, "characters")


def _characters(texts: str | list[str] | None) -> int:
    if not texts:
        return 0
    return len(texts) if isinstance(texts, str) else sum(map(len, texts))


def _check_limit(field: str, limit: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise ApiError(
            400,
            f"{field} comes to {size} {unit} with all prompts and completions counted; this server "
            f"takes {most} ({limit}): send less in one request",
            param=field,
        )
