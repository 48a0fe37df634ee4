"""Prompts as token ids that fit the context: encoded, truncated, measured."""

import asyncio
from typing import Literal

from fornax.data import Tokenizer
from fornax.llm.server.errors import ApiError

__all__ = ["Encoder"]

_LONG = 4096
"""Characters from which a text is encoded in a thread, so that streams go on meanwhile."""


class Encoder:
    """A tokenizer for prompts of at most a length."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._backend = tokenizer.backend
        self.vocab_size = tokenizer.vocab_size
        self.max_model_len = max_model_len
        self._longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    async def encode(
        self, text: str, *, add_special_tokens: bool, truncated: bool = False
    ) -> list[int]:
        """Token ids; 400 at once for a text that cannot fit, unless it will be truncated."""
        if not truncated and len(text) > self._longest * self.max_model_len:
            raise self._too_long(f"{len(text)} characters")
        if len(text) < _LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        encoding = await asyncio.to_thread(
            self._backend.encode, text, add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, ids: list[int], *, special: bool = True) -> str:
        """Text of token ids."""
        return self._backend.decode(ids, skip_special_tokens=not special)

    def pieces(self, ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for ids without a token."""
        return [self._backend.id_to_token(number) or "" for number in ids]

    def truncate(
        self,
        ids: list[int],
        keep: int | None,
        side: Literal["left", "right"],
        room: int,
    ) -> list[int]:
        """The last (`side` left is cut) or first `keep` ids; `keep` -1 is `room`."""
        if keep is None:
            return ids
        if keep > self.max_model_len:
            raise ApiError(
                400,
                f"truncate_prompt_tokens={keep} is above the context of {self.max_model_len}",
                param="truncate_prompt_tokens",
            )
        count = max(1, room) if keep < 0 else keep
        if count == 0:
            raise ApiError(
                400, "truncate_prompt_tokens=0 leaves nothing", param="truncate_prompt_tokens"
            )
        return ids[-count:] if side == "left" else ids[:count]

    def room(self, ids: list[int], limit: int | None) -> int:
        """Tokens that may be made after a prompt: `limit`, or what the context has left."""
        if not ids:
            raise ApiError(400, "the prompt has no tokens; give some text", param="prompt")
        left = self.max_model_len - len(ids)
        if left < 1:
            raise self._too_long(f"{len(ids)} tokens")
        if limit is None:
            return left
        if limit > left:
            raise ApiError(
                400,
                f"the context has {self.max_model_len} tokens, but {len(ids)} of the prompt and "
                f"{limit} to be made were asked for; shorten the prompt or max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return limit

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {size}, the context {self.max_model_len} tokens, of which one at "
            "least must be made; shorten the prompt or set truncate_prompt_tokens",
            param="prompt",
            code="context_length_exceeded",
        )
