"""Outputs in the shape of `/v1/chat/completions`."""

import time
from typing import Any

from pydantic_core import to_json

from fornax.llm.outputs import CompletionOutput, RequestOutput
from fornax.llm.server.chat_reading import Reading
from fornax.llm.server.chat_text import ChatText
from fornax.llm.server.chunks import Chunks, Interval, Tally, usage_in
from fornax.llm.server.logprobs import chat_logprobs, prompt_logprobs
from fornax.llm.server.protocol.chat import ChatBody
from fornax.llm.server.record import Record
from fornax.llm.server.state import Server

__all__ = ["ChatShaper"]


class ChatShaper:
    """Shapes the outputs of one request."""

    def __init__(
        self,
        body: ChatBody,
        server: Server,
        record: Record,
        answer_id: str,
        *,
        prompt: str,
        reading: Reading,
    ):
        """`prompt` is what the chat template made."""
        reader = reading.reader
        self._named = reading.named
        self._body = body
        self._encoder = server.encoder
        self._record = record
        self._prompt = prompt
        self._reader = reader
        self._readers: dict[int, ChatText] = {}
        self._role = server.config.response_role
        self._echo = _echoed(body, self._role)
        self._as_ids = server.names_tokens_by_id(body.return_tokens_as_token_ids)
        self._tally = Tally(server.config.enable_prompt_tokens_details)
        self._head = {
            "id": answer_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or server.names[0],
            "system_fingerprint": None,
        }
        usage = usage_in(body.stream_options, server.config.enable_force_include_usage)
        self._chunks = Chunks(self._head, b'"delta":{"content":', b"}", usage)
        self._interval = Interval(body.stream_interval)
        self._begun: set[int] = set()
        self._choices: dict[int, dict[str, Any]] = {}
        self._beside: dict[str, Any] = {}
        self._plain = (
            reader is None and not body.logprobs and not body.return_token_ids and usage != "every"
        )

    def push(self, output: RequestOutput) -> bytes:
        """Take an output; a stream's events for it."""
        self._tally.add(output)
        if not self._body.stream:
            for completion in output.outputs:
                self._choices[completion.index] = self._choice(completion)
            self._beside = self._about_prompt(output)
            return b""
        if len(output.outputs) == 1:
            return self._events(output, output.outputs[0])
        return b"".join([self._events(output, each) for each in output.outputs])

    def _events(self, output: RequestOutput, completion: CompletionOutput) -> bytes:
        index = completion.index
        begin = b"" if index in self._begun else self._begin(index, output)
        new = self._interval.due(completion, index)
        if new is None:
            return begin
        if self._plain and new.finish_reason is None:
            return begin + self._chunks.text(index, new.text) if new.text else begin
        return begin + b"".join(
            self._chunks.choice(choice, self._tally) for choice in self._deltas(new)
        )

    def _begin(self, index: int, output: RequestOutput) -> bytes:
        """The event with a choice's role, and with what is told about the prompt."""
        beside = {} if self._begun else self._about_prompt(output)
        self._begun.add(index)
        delta = {"role": self._role, "content": self._echo}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunks.choice(choice, self._tally, beside)

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        if self._body.return_prompt_text:
            told["prompt_text"] = self._prompt
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return told

    def _deltas(self, new: CompletionOutput) -> list[dict[str, Any]]:
        """What is new of a choice, a delta each; the last has how it ended."""
        if self._reader is None:
            deltas: list[dict[str, Any]] = [{"content": new.text}] if new.text else []
            called = False
        else:
            reader = self._readers.setdefault(new.index, self._reader())
            deltas = reader.push(new.text)
            if new.finished:
                deltas += reader.finish()
            called = reader.called
        whole = self._ending(new, called)
        if not deltas and not (new.finished or whole["logprobs"] or "token_ids" in whole):
            return []
        choices = [
            {"index": new.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas or [{}]
        ]
        choices[-1] |= whole
        return choices

    def _ending(self, new: CompletionOutput, called: bool) -> dict[str, Any]:
        """What of a choice does not depend on its text."""
        reason = new.finish_reason
        if called and reason == "stop" and not self._named:
            reason = "tool_calls"
        ending: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": new.stop_reason,
        }
        if self._body.logprobs and new.logprobs is not None:
            ending["logprobs"] = chat_logprobs(
                new.token_ids,
                new.logprobs,
                as_ids=self._as_ids,
                top=self._body.top_logprobs or 0,
                spell=lambda number: self._encoder.decode([number]),
            )
        if self._body.return_token_ids:
            ending["token_ids"] = new.token_ids
        return ending

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""
        message: dict[str, Any] = {"role": self._role, "content": self._echo + completion.text}
        called = False
        if self._reader is not None:
            reader = self._reader()
            found = reader.whole(completion.text)
            message |= found
            if found["content"] is not None or self._echo:
                message["content"] = self._echo + (found["content"] or "")
            called = reader.called
        return {
            "index": completion.index,
            "message": message,
            **self._ending(completion, called),
        }

    def events(self) -> bytes:
        """The end of a stream."""
        self._tally.note(self._record)
        return self._chunks.last(self._tally)

    def whole(self) -> bytes:
        """The answer that is no stream."""
        self._tally.note(self._record)
        choices = [self._choices[index] for index in sorted(self._choices)]
        usage = self._tally.usage()
        return to_json({**self._head, "choices": choices, "usage": usage, **self._beside})


def _echoed(body: ChatBody, role: str) -> str:
    """The text of the last message where it is to stand before the answer."""
    last = body.messages[-1]
    if not body.echo or last.role != role or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text for part in last.content)
