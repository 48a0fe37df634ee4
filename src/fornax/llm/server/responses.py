"""Engine outputs as an endpoint's answer: JSON, or server-sent events; usage; log probabilities."""

import abc
import base64
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Literal

import numpy as np
from pydantic_core import to_json

from fornax.llm.outputs import CompletionOutput, Logprob, RequestOutput
from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.protocol import GenerationBody, JsonObject
from fornax.llm.server.state import Server

__all__ = [
    "JsonObject",
    "ResponseBuilder",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_logprobs",
    "routed_experts",
]


@dataclass(slots=True)
class UsageCounter:
    """Tokens that a request took so far."""

    details: bool
    """Whether usage has the number of cached tokens."""
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

    def usage(self) -> JsonObject:
        """OpenAI's usage object."""
        usage: JsonObject = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


class ChunkEncoder:
    """Events of one request, shaped once so that a token of text costs one concatenation."""

    def __init__(
        self, head: JsonObject, text: tuple[bytes, bytes], usage: Literal["none", "last", "every"]
    ):
        """`head` begins every chunk; a token's text stands between the two parts of `text`; `usage`
        says which events carry it."""
        self.usage = usage
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._before, after = text
        null = b',"usage":null' if usage == "last" else b""
        self._tail = b"]" + null + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}
        self._suffix = (
            after + b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._tail
        )

    def text(self, index: int, text: str) -> bytes:
        """New text of one choice and nothing else."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._head + b'{"index":%d,' % index + self._before
            self._prefixes[index] = prefix
        return prefix + encode_basestring(text).encode() + self._suffix

    def choice(
        self, choice: JsonObject, counter: UsageCounter, extra: JsonObject | None = None
    ) -> bytes:
        """One choice with everything it has; `extra` is beside the choices."""
        tail = self._tail
        fields = dict(extra or {})
        if self.usage == "every":
            fields["usage"] = counter.usage()
        if fields:
            tail = b"]," + to_json(fields)[1:-1] + self._tail[1:]
        return self._head + to_json(choice) + tail

    def last(self, counter: UsageCounter) -> bytes:
        """The usage, in an event without choices; empty when it was not asked for."""
        if self.usage == "none":
            return b""
        return self._head + b'],"usage":' + to_json(counter.usage()) + b"}\n\n"


class ResponseBuilder(abc.ABC):
    """Builds the answer to one request from the engine's outputs."""

    def __init__(
        self,
        body: GenerationBody,
        server: Server,
        context: RequestContext,
        *,
        answer_id: str,
        kind: str,
        text: tuple[bytes, bytes],
    ):
        """`kind` is the answer's field `object`; `text` as in `ChunkEncoder`."""
        self._encoder = server.encoder
        self._context = context
        asked = body.return_tokens_as_token_ids
        self._as_ids = bool(server.config.return_tokens_as_token_ids if asked is None else asked)
        self._stream = bool(body.stream)
        self._usage = UsageCounter(server.config.enable_prompt_tokens_details)
        self._head = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": body.model or server.names[0],
            "system_fingerprint": None,
        }
        options, usage = body.stream_options, "none"
        if server.config.enable_force_include_usage or (options and options.include_usage):
            usage = "last"
        if options and options.include_usage and options.continuous_usage_stats:
            usage = "every"
        self._chunks = ChunkEncoder(self._head, text, usage)
        self._interval = body.stream_interval or 1
        self._held: dict[int, CompletionOutput] = {}
        self._sent: set[int] = set()
        self._choices: dict[int, JsonObject] = {}

    def push(self, output: RequestOutput) -> bytes:
        """Take an output; the events it makes, empty when there are none or no stream is wanted."""
        self._usage.add(output)
        if not self._stream:
            for completion in output.outputs:
                index = self._index(output, completion)
                self._choices[index] = self._whole_choice(index, output, completion)
            return b""
        if len(output.outputs) == 1:
            return self._events(self._index(output, output.outputs[0]), output, output.outputs[0])
        return b"".join(
            [self._events(self._index(output, each), output, each) for each in output.outputs]
        )

    def stream_end(self) -> bytes:
        """The last events of a stream."""
        self._log_usage()
        return self._chunks.last(self._usage)

    def body(self) -> bytes:
        """The answer that is not a stream."""
        self._log_usage()
        choices = [self._choices[index] for index in sorted(self._choices)]
        usage = self._usage.usage()
        return to_json({**self._head, "choices": choices, "usage": usage, **self._extra()})

    @abc.abstractmethod
    def _index(self, output: RequestOutput, completion: CompletionOutput) -> int:
        """The choice's index in the answer."""

    @abc.abstractmethod
    def _events(self, index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        """The events of what is new of a choice."""

    @abc.abstractmethod
    def _whole_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> JsonObject:
        """A choice of an answer that is not a stream."""

    def _extra(self) -> JsonObject:
        """What is beside the choices of an answer that is not a stream."""
        return {}

    def _due(self, completion: CompletionOutput, index: int) -> CompletionOutput | None:
        """What is to be sent now: every `stream_interval` tokens, and a choice's first and last."""
        if self._interval == 1:
            return completion
        held = self._held.pop(index, None)
        if held is not None:
            completion.text = held.text + completion.text
            completion.token_ids = held.token_ids + completion.token_ids
            if completion.logprobs is not None:
                completion.logprobs = (held.logprobs or []) + completion.logprobs
        enough = len(completion.token_ids) >= self._interval
        if enough or completion.finished or index not in self._sent:
            self._sent.add(index)
            return completion
        self._held[index] = completion
        return None

    def _decode(self, token: int) -> str:
        return self._encoder.decode([token])

    def _log_usage(self) -> None:
        self._context.log_fields["prompt_tokens"] = self._usage.prompt
        self._context.log_fields["completion_tokens"] = self._usage.completion


def routed_experts(completion: CompletionOutput) -> JsonObject:
    """The field with the experts of a choice that has ended, where the engine returns them: as vLLM
    has it, base64 of the .npy file of an unsigned array [tokens - 1, layers, experts per token]."""
    found = completion.routed_experts
    if found is None:
        return {}
    file = io.BytesIO()
    np.save(file, found.view(found.dtype.str.replace("i", "u")), allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}


_LOWEST = -9999.0
"""JSON has no infinity; this stands for minus infinity, as in vLLM."""

Position = Mapping[int, Logprob]
Decode = Callable[[int], str]
"""Text of a token id, for tokens that come without."""


def completion_logprobs(
    ids: Sequence[int],
    positions: Sequence[Position | None],
    offset: int,
    *,
    as_ids: bool,
    top: int,
    decode: Decode,
) -> tuple[JsonObject, int]:
    """Completions' object for tokens whose text begins at `offset`; and the offset after them.

    A position is None for the first token of a prompt, which nothing predicts.
    """
    tokens, chosen, offsets = [], [], []
    others: list[dict[str, float] | None] = []
    for number, position in zip(ids, positions, strict=True):
        entry = None if position is None else position.get(number)
        tokens.append(_text(number, entry, as_ids, decode))
        offsets.append(offset)
        offset += len(_text(number, entry, False, decode))
        chosen.append(None if entry is None else _finite(entry.logprob))
        others.append(
            None
            if position is None
            else {
                _text(other, item, as_ids, decode): _finite(item.logprob)
                for other, item in position.items()
                if top < 0 or item.rank <= top or other == number
            }
        )
    shaped = {
        "text_offset": offsets,
        "token_logprobs": chosen,
        "tokens": tokens,
        "top_logprobs": others,
    }
    return shaped, offset


def chat_logprobs(
    ids: Sequence[int], positions: Sequence[Position], *, as_ids: bool, top: int, decode: Decode
) -> JsonObject:
    """Chats' object: each token with the most likely ones at its place."""
    return {
        "content": [
            {
                **_entry(number, position[number], as_ids, decode),
                "top_logprobs": [
                    _entry(other, item, as_ids, decode)
                    for other, item in sorted(position.items(), key=lambda pair: pair[1].rank)
                    if top < 0 or item.rank <= top
                ],
            }
            for number, position in zip(ids, positions, strict=True)
        ]
    }


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[JsonObject | None] | None:
    """vLLM's `prompt_logprobs`: for each prompt token, by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(number): {
                "logprob": _finite(item.logprob),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for number, item in position.items()
        }
        for position in positions
    ]


def _entry(number: int, item: Logprob, as_ids: bool, decode: Decode) -> JsonObject:
    text = _text(number, item, as_ids, decode)
    return {
        "token": text,
        "logprob": _finite(item.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _text(number: int, item: Logprob | None, as_ids: bool, decode: Decode) -> str:
    if as_ids:
        return f"token_id:{number}"
    if item is None or item.decoded_token is None:
        return decode(number)
    return item.decoded_token


def _finite(value: float) -> float:
    return value if value > _LOWEST else _LOWEST
