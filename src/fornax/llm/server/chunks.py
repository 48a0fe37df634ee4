"""The events of a stream, shaped once per request so that a token costs one concatenation."""

from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Literal

from pydantic_core import to_json

from fornax.llm.outputs import CompletionOutput, RequestOutput
from fornax.llm.server.protocol.base import StreamOptions
from fornax.llm.server.record import Record

__all__ = ["Chunks", "Interval", "Tally", "UsageIn"]

UsageIn = Literal["none", "last", "every"]
"""Which events carry the usage."""


def usage_in(options: StreamOptions | None, force: bool) -> UsageIn:
    """What a request's stream options ask for."""
    if options is not None and options.include_usage and options.continuous_usage_stats:
        return "every"
    return "last" if force or (options is not None and options.include_usage) else "none"


@dataclass(slots=True)
class Tally:
    """Tokens that a request took so far."""

    details: bool
    """Whether cached tokens are told."""
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    seen: set[str] = field(default_factory=set)

    def add(self, output: RequestOutput) -> None:
        """Count an output's tokens, and its prompt's when it is the first."""
        if output.request_id not in self.seen:
            self.seen.add(output.request_id)
            self.prompt += len(output.prompt_token_ids)
            self.cached += output.num_cached_tokens
        for completion in output.outputs:
            self.completion += len(completion.token_ids)

    def note(self, record: Record) -> None:
        """Say the counts in the access log's line."""
        record.fields["prompt_tokens"] = self.prompt
        record.fields["completion_tokens"] = self.completion

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


class Chunks:
    """Events of one request. Text alone takes the short way, everything else goes as JSON."""

    def __init__(self, head: dict[str, Any], before: bytes, after: bytes, usage: UsageIn):
        """`head` is what all chunks begin with; text stands between `before` and `after`."""
        self.usage = usage
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._before = before
        null = b',"usage":null' if usage == "last" else b""
        self._after = after + b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
        self._tail = b"]" + null + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}
        self._suffix = self._after + self._tail

    def text(self, index: int, text: str) -> bytes:
        """New text of one choice and nothing else."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._head + b'{"index":%d,' % index + self._before
            self._prefixes[index] = prefix
        return prefix + encode_basestring(text).encode() + self._suffix

    def choice(
        self,
        choice: dict[str, Any],
        tally: Tally,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """One choice with everything it has; `extra` stands beside the choices."""
        tail = self._tail
        beside = dict(extra or {})
        if self.usage == "every":
            beside["usage"] = tally.usage()
        if beside:
            tail = b"]," + to_json(beside)[1:-1] + self._tail[1:]
        return self._head + to_json(choice) + tail

    def last(self, tally: Tally) -> bytes:
        """The usage, in an event without choices; empty when it was not asked for."""
        if self.usage == "none":
            return b""
        return self._head + b'],"usage":' + to_json(tally.usage()) + b"}\n\n"


class Interval:
    """Holds a choice's tokens back until there are enough for an event."""

    def __init__(self, tokens: int | None):
        self._tokens = tokens or 1
        self._held: dict[int, CompletionOutput] = {}
        self._begun: set[int] = set()

    def due(self, completion: CompletionOutput, index: int) -> CompletionOutput | None:
        """What is to be sent now; the first and last tokens of a choice always are."""
        if self._tokens == 1:
            return completion
        held = self._held.pop(index, None)
        if held is not None:
            completion.text = held.text + completion.text
            completion.token_ids = held.token_ids + completion.token_ids
            if completion.logprobs is not None:
                completion.logprobs = (held.logprobs or []) + completion.logprobs
        enough = len(completion.token_ids) >= self._tokens
        if enough or completion.finished or index not in self._begun:
            self._begun.add(index)
            return completion
        self._held[index] = completion
        return None
