"""How a chat's answer is read: which parsers, and what the text is made to be."""

from collections.abc import Callable
from dataclasses import dataclass

from fornax.llm.sampling_params import StructuredOutputsParams
from fornax.llm.server.chat_text import ChatText
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.chat import ChatBody
from fornax.llm.server.protocol.messages import NamedToolChoice
from fornax.llm.text.reasoning import ReasoningParser, reasoning_style
from fornax.llm.text.tools import (
    NEEDS_SPECIAL_TOKENS,
    ToolParser,
    forced_parser,
    forced_schema,
    tool_parser,
)

__all__ = ["Reading", "check_parsers", "read_chat"]


@dataclass(frozen=True)
class Reading:
    """How one request's answer is read."""

    reader: Callable[[], ChatText] | None
    """Makes the reader of a choice; None when all of its text is content."""
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


def read_chat(body: ChatBody, config: ServerConfig, prompt: str) -> Reading:
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

    def reader() -> ChatText:
        thinking: ReasoningParser | None = None if style is None else style.parser(opened=opened)
        tools: ToolParser | None = None
        if forced:
            tools = forced_parser(name)
        elif choice == "auto" and config.tool_call_parser is not None:
            tools = tool_parser(config.tool_call_parser)
        return ChatText(
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
    return Reading(
        reader=reader if style is not None or choice != "none" else None,
        structured=structured,
        special_tokens=config.reasoning_parser == "mistral"
        or (choice == "auto" and config.tool_call_parser in NEEDS_SPECIAL_TOKENS),
        constrain_after=style.end if style is not None and (forced or constrained) else "",
        named=name is not None,
    )
