"""Reasoning and tool calls in a chat's answer: which parsers read it, and the deltas they make."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fornax.llm.sampling_params import StructuredOutputsParams
from fornax.llm.server.chat_protocol import ChatBody, NamedToolChoice
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol import JsonObject
from fornax.llm.text.parsing import Arguments, Content, Event, Start, ToolParser, gather
from fornax.llm.text.reasoning import Reasoned, ReasoningParser, reasoning_style
from fornax.llm.text.tools import NEEDS_SPECIAL_TOKENS, forced_parser, forced_schema, tool_parser

__all__ = ["ChatParser", "ParserChoice", "check_parsers", "choose_parsers"]


class ChatParser:
    """Reads one choice's text as it comes; without parsers all of it is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool,
        parallel: bool,
        short_ids: bool,
    ):
        """`parallel` False keeps the first call only; `short_ids` makes ids as Mistral's are."""
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._parallel = parallel
        self._short_ids = short_ids
        self.called = False
        """Whether a tool was called."""

    def push(self, text: str) -> list[JsonObject]:
        """The deltas that new text makes."""
        read = Reasoned("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._thoughts(read.reasoning) + self._deltas(self._events(read.content))

    def finish(self) -> list[JsonObject]:
        """The deltas of what was held back."""
        read = Reasoned("", "") if self._reasoning is None else self._reasoning.finish()
        events = self._events(read.content)
        if self._tools is not None:
            events += self._allowed(self._tools.finish())
        return self._thoughts(read.reasoning) + self._deltas(events)

    def message(self, text: str) -> JsonObject:
        """The message that a whole text makes."""
        reasoning = ""
        if self._reasoning is not None:
            first, last = self._reasoning.push(text), self._reasoning.finish()
            reasoning, text = first.reasoning + last.reasoning, first.content + last.content
        message: JsonObject = {"content": text}
        if reasoning and self._shows_reasoning:
            message["reasoning"] = reasoning
        if self._tools is None:
            return message
        content, calls = gather(self._events(text) + self._allowed(self._tools.finish()))
        message["content"] = content
        if calls:
            self.called = True
            message["content"] = content if content.strip() else None
            message["tool_calls"] = [
                {
                    "id": self._id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._allowed(self._tools.push(text))

    def _allowed(self, events: Iterable[Event]) -> list[Event]:
        if self._parallel:
            return list(events)
        return [event for event in events if isinstance(event, Content) or event.index == 0]

    def _thoughts(self, text: str) -> list[JsonObject]:
        return [{"reasoning": text}] if text and self._shows_reasoning else []

    def _deltas(self, events: Iterable[Event]) -> list[JsonObject]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> JsonObject | None:
        match event:
            case Content(text):
                return {"content": text} if text else None
            case Start(index, name):
                self.called = True
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._id(), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _id(self) -> str:
        """A call's id; Mistral's templates take only nine letters and digits."""
        return secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ParserChoice:
    """How one request's answer is read."""

    make_parser: Callable[[], ChatParser] | None
    """Makes the parser of a choice; None when all of its text is content."""
    structured: StructuredOutputsParams | None
    """What makes the text a tool call."""
    special_tokens: bool
    """Whether markers are special tokens, which the text must then show."""
    constrain_after: str
    """The end of the reasoning, after which constraints hold; empty when they hold at once."""
    named: bool
    """Whether the request names the function: such an answer ends with `stop`."""


def check_parsers(config: ServerConfig) -> None:
    """EngineError for a parser that there is not."""
    if config.tool_call_parser is not None:
        tool_parser(config.tool_call_parser)
    if config.reasoning_parser is not None:
        reasoning_style(config.reasoning_parser)


def choose_parsers(body: ChatBody, config: ServerConfig, prompt: str) -> ParserChoice:
    """How the answer to `prompt` is read; 400 for tools that this server cannot find in it."""
    choice = body.choice()
    forced = choice == "required" or isinstance(choice, NamedToolChoice)
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    constrained = body.structured_outputs is not None or (
        body.response_format is not None and body.response_format.type != "text"
    )
    if forced and constrained:
        raise ApiError(
            400,
            "tool_choice makes the text a tool call; leave response_format and "
            "structured_outputs out",
            param="tool_choice",
        )
    if choice == "auto" and not config.enable_auto_tool_choice:
        raise ApiError(
            400,
            "tool_choice=auto needs a server started with --enable-auto-tool-choice and "
            "--tool-call-parser; use required, none, or name a function",
            param="tool_choice",
        )
    parallel = body.parallel_tool_calls is not False
    style = None if config.reasoning_parser is None else reasoning_style(config.reasoning_parser)
    opened = style is not None and style.opened_by(prompt)
    if not opened and (forced or constrained):
        style = None  # a text that need not reason is constrained from its first token

    def make_parser() -> ChatParser:
        thinking: ReasoningParser | None = None if style is None else style.parser(opened=opened)
        tools: ToolParser | None = None
        if forced:
            tools = forced_parser(name)
        elif choice == "auto" and config.tool_call_parser is not None:
            tools = tool_parser(config.tool_call_parser)
        return ChatParser(
            thinking,
            tools,
            shows_reasoning=body.include_reasoning,
            parallel=parallel,
            short_ids=config.tool_call_parser == "mistral",
        )

    structured = None
    if forced:
        offered = [tool.plain() for tool in body.tools or ()]
        structured = StructuredOutputsParams(json=forced_schema(offered, name, parallel=parallel))
    return ParserChoice(
        make_parser=make_parser if style is not None or choice != "none" else None,
        structured=structured,
        special_tokens=config.reasoning_parser == "mistral"
        or (choice == "auto" and config.tool_call_parser in NEEDS_SPECIAL_TOKENS),
        constrain_after=style.end if style is not None and (forced or constrained) else "",
        named=name is not None,
    )
