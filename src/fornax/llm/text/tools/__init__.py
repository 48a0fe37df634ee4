"""Read a model's tool calls out of its text, and make it write them."""

from fornax.llm.text.tools.choice import (
    NEEDS_SPECIAL_TOKENS,
    TOOL_PARSERS,
    forced_parser,
    forced_schema,
    tool_parser,
)
from fornax.llm.text.tools.events import (
    Arguments,
    Call,
    Content,
    Event,
    Start,
    ToolParser,
    gather,
)

__all__ = [
    "NEEDS_SPECIAL_TOKENS",
    "TOOL_PARSERS",
    "Arguments",
    "Call",
    "Content",
    "Event",
    "Start",
    "ToolParser",
    "forced_parser",
    "forced_schema",
    "gather",
    "tool_parser",
]
