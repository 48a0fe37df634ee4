"""`POST /tokenize` and `POST /detokenize`."""

from fastapi import APIRouter

from fornax.llm.server.body import StrictRoute, failures
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.tokens import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    TokenizeChatBody,
    Tokens,
)
from fornax.llm.server.state import ServerOf

__all__ = ["router"]

router = APIRouter(tags=["Tokens"], route_class=StrictRoute)


@router.post("/tokenize", response_model=Tokens, responses=failures(404))
async def tokenize(body: TokenizeBody | TokenizeChatBody, server: ServerOf) -> Tokens:
    """A text, or a conversation through the chat template, as token ids."""
    server.adapter(body.model)
    if isinstance(body, TokenizeChatBody):
        prompt, special = server.chats.render(body), body.add_special_tokens
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
async def detokenize(body: DetokenizeBody, server: ServerOf) -> Detokenized:
    """Token ids as text, special tokens included."""
    server.adapter(body.model)
    size = server.encoder.vocab_size
    if body.tokens and max(body.tokens) >= size:
        raise ApiError(400, f"tokens: {max(body.tokens)} is not below {size}", param="tokens")
    return Detokenized(prompt=server.encoder.decode(body.tokens))
