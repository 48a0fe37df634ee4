"""`POST /tokenize` and `POST /detokenize`: requests and answers."""

from fornax.llm.server.protocol.base import Body, Listed, Reply, TokenId
from fornax.llm.server.protocol.messages import ChatPrompt

__all__ = ["DetokenizeBody", "Detokenized", "TokenizeBody", "TokenizeChatBody", "Tokens"]


class TokenizeBody(Body):
    """A text to tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatBody(ChatPrompt):
    """A conversation to tokenize as a chat would."""

    model: str | None = None
    return_token_strs: bool | None = False


class Tokens(Reply):
    """Token ids, how many, and how many the context has room for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    tokens: Listed[TokenId]
    model: str | None = None


class Detokenized(Reply):
    """The text."""

    prompt: str
