"""Between tokens and what a client reads: text, chats, reasoning, tool calls."""

from fornax.llm.text.detokenizer import Detokenizer, Pushed
from fornax.llm.text.token_table import TokenTable

__all__ = ["Detokenizer", "Pushed", "TokenTable"]
