"""Chat messages to tokens and back; what the model wrote is never tokenized again."""

from collections.abc import Sequence
from typing import Protocol

from fornax.config.errors import EngineError
from fornax.llm.text.parsing import gather
from fornax.llm.text.tools import tool_parser
from fornax.tune.data import Codec
from fornax.tune.rollout.types import Completion, Message, ToolSchemas

__all__ = ["ChatFraming", "Framing", "TextFraming"]

_MARK = "FORNAXMARKSTHEEND"
"""Stands for the model's text where a template is asked what it puts after them."""


class Framing(Protocol):
    """How a conversation is written down."""

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Tokens of the prompt, up to the beginning of the assistant's turn."""

    def continuation(
        self,
        history: Sequence[Message],
        answers: Sequence[Message],
        tools: ToolSchemas,
        last: int,
    ) -> list[int]:
        """Tokens between the model's turn and its next.

        Args:
          history: the conversation; its last message is the model's.
          answers: the environment's messages.
          tools: functions in OpenAI's form.
          last: the model's last token.
        """

    def message(self, completion: Completion) -> Message:
        """A completion as the assistant's message."""


class TextFraming:
    """Plain text for models without a chat template: contents are concatenated."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Tokens of the contents, one after the other."""
        _no_tools(tools)
        return self._codec.prompt(_contents(messages)).tolist()

    def continuation(
        self,
        history: Sequence[Message],
        answers: Sequence[Message],
        tools: ToolSchemas,
        last: int,
    ) -> list[int]:
        """Tokens of the answers' contents."""
        del history, tools, last
        encoder = self._codec.encoder
        return encoder.encode_continuation(encoder.escape_special(_contents(answers))).tolist()

    def message(self, completion: Completion) -> Message:
        """The text."""
        return {"role": "assistant", "content": completion.text}


class ChatFraming:
    """The model's own chat template.

    Args:
      codec: tokenizer, end tokens and chat template.
      parser: how the model writes tool calls, by vLLM's names (`hermes`, `llama3_json`, …); None:
        it calls no tools.

    Raises `EngineError` for a template that nothing can follow, and for an unknown parser.
    """

    def __init__(self, codec: Codec, *, parser: str | None = None) -> None:
        if codec.template is None:
            raise EngineError(
                "the model has no chat template; give the codec one, or use TextFraming"
            )
        self._codec = codec
        self._template = codec.template
        self._parser = parser
        if parser is not None:
            tool_parser(parser)
        question: Message = {"role": "user", "content": "?"}
        answer: Message = {"role": "assistant", "content": _MARK}
        self._end = _after_mark(self._render([question, answer], (), generate=False))

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Tokens of the template, up to the beginning of the assistant's turn."""
        if self._parser is None:
            _no_tools(tools)
        plain = [dict(message) for message in messages]
        functions = [dict(tool) for tool in tools] or None
        return self._codec.prompt(plain, functions).tolist()

    def continuation(
        self,
        history: Sequence[Message],
        answers: Sequence[Message],
        tools: ToolSchemas,
        last: int,
    ) -> list[int]:
        """Tokens of the end of the model's turn, as far as it did not write it, and the answers."""
        answers = [_safe_message(self._codec, each) for each in answers]
        encoder = self._codec.encoder
        ids = encoder.encode_continuation(
            self._end + self._between(history, answers, tools)
        ).tolist()
        ends = encoder.encode_continuation(self._end).tolist()
        if last in self._codec.eos_ids and last in ends:
            return ids[ends.index(last) + 1 :]
        return ids

    def message(self, completion: Completion) -> Message:
        """The text, and the tool calls in it."""
        if self._parser is None:
            return {"role": "assistant", "content": completion.text}
        ids = completion.tokens.tolist()
        while ids and ids[-1] in self._codec.eos_ids:
            ids.pop()
        parser = tool_parser(self._parser)
        content, calls = gather([*parser.push(self._codec.encoder.decode(ids)), *parser.finish()])
        message: dict[str, object] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call{number:05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
            ]
        return message

    def _between(
        self,
        history: Sequence[Message],
        answers: Sequence[Message],
        tools: ToolSchemas,
    ) -> str:
        """What the template writes after the end of the model's turn."""
        try:
            before = self._render(history, tools, generate=False)
            whole = self._render([*history, *answers], tools, generate=True)
        except EngineError:  # arguments that are not JSON, most often: the model wrote them
            before, whole = "?", ""
        if whole.startswith(before) and before.endswith(self._end):
            return whole[len(before) :]
        # The template writes earlier turns differently once others follow. What the model wrote
        # stays as it is; a conversation of two turns shows what comes after it.
        short = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        rest = _after_mark(self._render([*short, *answers], tools, generate=True))
        if not rest.startswith(self._end):
            raise EngineError(
                f"the chat template ends a turn with {self._end!r} or otherwise, depending on what "
                "follows, so that a conversation cannot continue after the model's own tokens; use "
                "another template"
            )
        return rest[len(self._end) :]

    def _render(self, messages: Sequence[Message], tools: ToolSchemas, *, generate: bool) -> str:
        return self._template.render(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=generate,
            variables=self._codec.variables,
        )


def _after_mark(text: str) -> str:
    before, found, after = text.rpartition(_MARK)
    del before
    if not found:
        raise EngineError(
            "the chat template leaves the assistant's words out or changes them, so that a "
            "conversation cannot continue after the model's own tokens; use another template"
        )
    return after


def _contents(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


def _no_tools(tools: ToolSchemas) -> None:
    if tools:
        raise EngineError(
            "the environment has tools and nothing reads the model's calls; use ChatFraming with "
            "the model's tool parser, such as parser='hermes'"
        )


def _safe_message(codec: Codec, message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": codec.encoder.escape_special(content)}
