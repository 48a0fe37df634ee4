"""Outputs in the shape of `/v1/completions`."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from fornax.llm.outputs import CompletionOutput, RequestOutput
from fornax.llm.server.chunks import Chunks, Interval, Tally, usage_in
from fornax.llm.server.logprobs import completion_logprobs, prompt_logprobs
from fornax.llm.server.protocol.completions import CompletionBody
from fornax.llm.server.record import Record
from fornax.llm.server.state import Server

__all__ = ["CompletionShaper"]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What an echo shows of a prompt."""

    echo: str
    logprobs: dict[str, Any] | None


class CompletionShaper:
    """Shapes the outputs of one request."""

    def __init__(
        self,
        body: CompletionBody,
        server: Server,
        record: Record,
        answer_id: str,
        prompts: Mapping[str, int],
    ):
        """`prompts` has the number of each prompt by the id it was given to the engine under."""
        self._body = body
        self._encoder = server.encoder
        self._record = record
        self._numbers = prompts
        self._prompts: dict[str, _Prompt] = {}
        self._n = body.n or 1
        self._as_ids = server.names_tokens_by_id(body.return_tokens_as_token_ids)
        self._tally = Tally(server.config.enable_prompt_tokens_details)
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or server.names[0],
            "system_fingerprint": None,
        }
        usage = usage_in(body.stream_options, server.config.enable_force_include_usage)
        self._chunks = Chunks(self._head, b'"text":', b"", usage)
        self._interval = Interval(body.stream_interval)
        self._offsets: dict[int, int] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._plain = not (body.echo or body.return_token_ids or body.logprobs is not None)

    def push(self, output: RequestOutput) -> bytes:
        """Take an output; a stream's events for it."""
        self._tally.add(output)
        base = self._numbers[output.request_id] * self._n
        if not self._body.stream:
            for completion in output.outputs:
                index = base + completion.index
                self._choices[index] = self._whole_choice(index, output, completion)
            return b""
        if len(output.outputs) == 1:
            return self._event(base, output, output.outputs[0])
        return b"".join([self._event(base, output, each) for each in output.outputs])

    def _event(self, base: int, output: RequestOutput, new: CompletionOutput) -> bytes:
        index = base + new.index
        due = self._interval.due(new, index)
        if due is None:
            return b""
        if due.finish_reason is None and self._plain and self._chunks.usage != "every":
            return self._chunks.text(index, due.text) if due.text else b""
        return self._chunks.choice(self._choice(index, output, due), self._tally)

    def _whole_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        choice = self._choice(index, output, completion)
        choice["prompt_logprobs"] = (
            prompt_logprobs(output.prompt_logprobs)
            if self._body.prompt_logprobs is not None
            else None
        )
        return choice

    def _choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> dict[str, Any]:
        """A choice, or what is new of it; the prompt's part comes with its first."""
        first = index not in self._offsets
        prompt = self._prompt(output) if first and self._body.echo else None
        text, ids, logprobs = new.text, new.token_ids, new.logprobs
        if self._body.max_tokens == 0:  # one token was made only to score the prompt
            text, ids, logprobs = "", [], None if logprobs is None else []
        offset = self._offsets.get(index, len(prompt.echo) if prompt else 0)
        shaped, self._offsets[index] = None, offset
        if self._body.logprobs is not None and logprobs is not None:
            shaped, self._offsets[index] = completion_logprobs(
                ids,
                logprobs,
                offset,
                as_ids=self._as_ids,
                top=self._body.logprobs,
                spell=self._spell,
            )
        if prompt is not None:
            text = prompt.echo + text
            if shaped is not None and prompt.logprobs is not None:
                shaped = {key: prompt.logprobs[key] + shaped[key] for key in shaped}
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": shaped,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt(self, output: RequestOutput) -> _Prompt:
        found = self._prompts.get(output.request_id)
        if found is None:
            ids = output.prompt_token_ids
            text = output.prompt if output.prompt is not None else self._encoder.decode(ids)
            shaped = None
            if self._body.logprobs is not None and output.prompt_logprobs is not None:
                shaped, _ = completion_logprobs(
                    ids,
                    output.prompt_logprobs,
                    0,
                    as_ids=self._as_ids,
                    top=self._body.logprobs,
                    spell=self._spell,
                )
            found = self._prompts[output.request_id] = _Prompt(text, shaped)
        return found

    def _spell(self, number: int) -> str:
        return self._encoder.decode([number])

    def events(self) -> bytes:
        """The end of a stream."""
        self._tally.note(self._record)
        return self._chunks.last(self._tally)

    def whole(self) -> bytes:
        """The answer that is no stream."""
        self._tally.note(self._record)
        choices = [self._choices[index] for index in sorted(self._choices)]
        return to_json({**self._head, "choices": choices, "usage": self._tally.usage()})
