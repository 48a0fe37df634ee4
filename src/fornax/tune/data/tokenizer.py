"""Text to ids as the engine encodes it, and whether two models mean the same by them."""

import re

import numpy as np
from tokenizers import Tokenizer as Backend

from fornax.config.errors import ConfigError
from fornax.data import Tokenizer

__all__ = ["TextEncoder", "check_same_tokens", "shared_vocabulary"]


class TextEncoder:
    """A tokenizer that knows its special tokens in text, as the engine's does.

    `fornax.data` reads texts as data, in which no special token can be spelled. Here a prompt
    written with the markers of a chat means them.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._backend: Backend = Backend.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = False
        self._backend.no_truncation()
        self._backend.no_padding()
        self._head = self._beginning()
        self._anchor = self._ids("\n")
        self._adds_space = self._ids("\na") != [*self._anchor, *self._ids("a")]
        self.bos_id = self._head[0] if self._head else tokenizer.bos_id
        added = self._backend.get_added_tokens_decoder().values()
        special = sorted((t.content for t in added if t.special and t.content.strip()), key=len)
        self._special = re.compile("|".join(map(re.escape, reversed(special)))) if special else None

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _beginning(self) -> list[int]:
        """Ids that the tokenizer itself puts before a text."""
        plain, whole = self._ids("a"), self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return []

    def encode_with_offsets(
        self, text: str, *, follows: bool = False
    ) -> tuple[list[int], np.ndarray]:
        """Ids of a text that spells all of its special tokens, and their places in it.

        Args:
          text: begins a text, or continues after other tokens.
          follows: which of the two. Tokenizers that put a space before every text would put one
            between a prompt and its completion; with them a text that follows is encoded behind a
            line break, whose tokens are then taken away.

        Returns:
          The ids, and the characters where each begins and ends, int64 `[n, 2]`.
        """
        if follows and self._adds_space:
            found = self._backend.encode("\n" + text, add_special_tokens=False)
            count = len(self._anchor)
            if found.ids[:count] == self._anchor:
                offsets = np.asarray(found.offsets[count:], np.int64).reshape(-1, 2)
                return found.ids[count:], np.maximum(offsets - 1, 0)
        found = self._backend.encode(text, add_special_tokens=False)
        return found.ids, np.asarray(found.offsets, np.int64).reshape(-1, 2)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text's beginning, int32 `[n]`: the tokenizer's own first tokens, never twice."""
        ids = self._ids(text)
        repeated = bool(self._head) and ids[: len(self._head)] == self._head
        return np.asarray(ids if repeated else [*self._head, *ids], np.int32)

    def encode_continuation(self, text: str) -> np.ndarray:
        """Ids of a text that follows other tokens, int32 `[n]`."""
        return np.asarray(self.encode_with_offsets(text, follows=True)[0], np.int32)

    def find_special(self, text: str) -> str | None:
        """The first special token that a text spells."""
        found = self._special.search(text) if self._special else None
        return found.group() if found else None

    def escape_special(self, text: str) -> str:
        """The text with a space inside each special token that it spells, so that it spells none.

        For what a model or a tool wrote, which must not end a turn or begin another.
        """
        while (found := self.find_special(text)) is not None:
            text = text.replace(found, f"{found[0]} {found[1:]}")
        return text

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """Text of ids, special tokens included."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


def check_same_tokens(
    other: Tokenizer, own: Tokenizer, *, names: tuple[str, str], others: tuple[str, str]
) -> None:
    """Refuse a second model whose tokens mean something else.

    Args:
      other: the second model's tokenizer.
      own: the trained model's.
      names: what the second model is called in the config, and its path.
      others: the same of the trained one.

    Raises:
      ConfigError: naming tokens that differ.
    """
    theirs, ours = (t.backend.get_vocab(with_added_tokens=True) for t in (other, own))
    if theirs == ours:
        return
    differing = sorted(t for t in {*theirs, *ours} if theirs.get(t) != ours.get(t))
    shown = "; ".join(
        f"{t!r} is {_number(theirs, t)} there and {_number(ours, t)} here" for t in differing[:3]
    )
    raise ConfigError(
        f"the vocabularies of {names[0]}={names[1]} ({len(theirs)} tokens) and "
        f"{others[0]}={others[1]} ({len(ours)} tokens) differ in {len(differing)} tokens: {shown}. "
        "Both models must see the same tokens; take two that share a tokenizer"
    )


def _number(vocabulary: dict[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "missing"


def shared_vocabulary(teacher: int, student: int, tokens: int) -> int:
    """How many outputs to compare: models of one tokenizer pad their vocabularies differently.

    Raises:
      ConfigError: when a model has fewer outputs than its tokenizer has tokens.
    """
    shared = min(teacher, student)
    if shared < tokens:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens, and a model only {shared} outputs; check that "
            "teacher and student are of this tokenizer"
        )
    return shared
