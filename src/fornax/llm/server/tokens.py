"""`POST /tokenize` and `POST /detokenize`."""

from fastapi import APIRouter

from fornax.llm.server.chat_protocol import ChatPrompt
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol import Body, FailFastList, Reply, TokenId, failures
from fornax.llm.server.state import ServerDep
from fornax.llm.server.web import StrictRoute

__all__ = ["DetokenizeBody", "Detokenized", "TokenizeBody", "TokenizeChatBody", "Tokens", "router"]


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

    tokens: FailFastList[TokenId]
    model: str | None = None


class Detokenized(Reply):
    """The text."""

    prompt: str


router = APIRouter(tags=["Tokens"], route_class=StrictRoute)


@router.post("/tokenize", response_model=Tokens, responses=failures(404))
async def tokenize(body: TokenizeBody | TokenizeChatBody, server: ServerDep) -> Tokens:
    """A text, or a conversation through the chat template, as token ids."""
    server.adapter(body.model)
    if isinstance(body, TokenizeChatBody):
        prompt, special = server.renderer.render(body), body.add_special_tokens
    else:
        prompt, special = body.prompt, body.add_special_tokens
    ids = await server.encoder.encode(prompt, add_special_tokens=special, truncated=True)
    return Tokens(
        count=len(ids),
        max_model_len=server.engine.max_model_len,
        tokens=ids,
        token_strs=server.encoder.pieces(ids) if body.return_token_strs else None,
    )


@router.post("/detokenize", response_model=Detokenized, responses=failures(404))
async def detokenize(body: DetokenizeBody, server: ServerDep) -> Detokenized:
    """Token ids as text, special tokens included."""
    server.adapter(body.model)
    size = server.encoder.vocab_size
    if body.tokens and max(body.tokens) >= size:
        raise ApiError(400, f"tokens: {max(body.tokens)} is not below {size}", param="tokens")
    return Detokenized(prompt=server.encoder.decode(body.tokens))
