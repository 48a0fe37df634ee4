"""Tokens to make prompts of: from a tokenizer on disk, or from the server's own /tokenize."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fornax.config import EngineError
from fornax.llm.bench.connection import Pool, request_bytes

__all__ = ["LocalVocabulary", "ServedVocabulary", "Vocabulary"]

_WORDS = 4000
"""Random words whose tokens stand for a vocabulary that only the server knows."""


class Vocabulary(Protocol):
    """What prompts are made of."""

    @property
    def ids(self) -> Sequence[int]:
        """Ids of ordinary tokens."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class LocalVocabulary:
    """A tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from fornax.data import load_tokenizer

        self._tokenizer = load_tokenizer(path)
        special = {
            number
            for number, token in self._tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.ids = [n for n in range(self._tokenizer.vocab_size) if n not in special]

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return self._tokenizer.encode(text).tolist()

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(tokens)


class ServedVocabulary:
    """What the server says; `ids` are the tokens that random words have."""

    def __init__(self, pool: Pool, url: str, headers: dict[str, str], model: str) -> None:
        self._pool, self._url, self._headers, self._model = pool, url, headers, model
        self.ids: list[int] = []

    async def load(self, seed: int) -> "ServedVocabulary":
        """Fill `ids`."""
        rng = np.random.default_rng([seed, 2])
        letters = list(string.ascii_letters + string.digits + string.punctuation)
        words = ("".join(rng.choice(letters, rng.integers(1, 8))) for _ in range(_WORDS))
        self.ids = sorted(set(await self.encode(" ".join(words))))
        return self

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        asked = await self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})
        return asked["tokens"]

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return (await self._ask("/detokenize", {"tokens": list(tokens)}))["prompt"]

    async def _ask(self, path: str, fields: dict[str, object]) -> dict:
        body = json.dumps({"model": self._model, **fields}).encode()
        answer = await self._pool.exchange(
            request_bytes("POST", self._url + path, headers=self._headers, body=body)
        )
        if answer.status != 200:
            raise EngineError(
                f"{self._url}{path} answered with status {answer.status}, so prompts cannot be "
                "made with the server's tokenizer; name one with --tokenizer PATH"
            )
        return json.loads(answer.body)
