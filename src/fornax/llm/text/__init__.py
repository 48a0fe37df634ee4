"""Between tokens and what a client reads: text, chats, reasoning, tool calls."""

from fornax.llm.text.chat_template import ChatTemplate, special_tokens
from fornax.llm.text.detokenizer import Detokenizer, Pushed
from fornax.llm.text.reasoning import (
    REASONING_PARSERS,
    Reasoned,
    ReasoningParser,
    ReasoningStyle,
    reasoning_style,
)
from fornax.llm.text.token_table import TokenTable

__all__ = [
    "REASONING_PARSERS",
    "ChatTemplate",
    "Detokenizer",
    "Pushed",
    "Reasoned",
    "ReasoningParser",
    "ReasoningStyle",
    "TokenTable",
    "reasoning_style",
    "special_tokens",
]
