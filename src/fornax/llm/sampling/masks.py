"""Which tokens a sequence may choose next, as bits that the sampler reads; made by the host.

Token t is bit t % 32 of word t // 32; a bit that is 1 allows the token.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fornax.config.errors import EngineError
from fornax.llm.sampling_params import SamplingParams

__all__ = ["ALL", "TokenRules", "bad_word_tokens", "full_mask", "mask_words", "token_mask"]

ALL = np.uint32(0xFFFFFFFF)
"""A word that allows its 32 tokens."""
MAX_BAD_WORDS = 1000
"""Most token sequences that the bad words of one request become, as in vLLM."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return (vocab_size + 31) // 32


def full_mask(vocab_size: int, *rows: int) -> np.ndarray:
    """Masks that allow every token, uint32 [*rows, W]."""
    return np.full((*rows, mask_words(vocab_size)), ALL)


def token_mask(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """A mask with the bits of these tokens, uint32 [W]."""
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    ids = np.asarray(tokens, np.int64)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask


class TokenRules:
    """A request's rules about tokens: allowed ones, bad words, min_tokens, a trace to replay."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        stop_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        """Prepare what does not change from token to token.

        Args:
            stop_ids: tokens that end a completion, end of text included: not chosen before
                min_tokens.
            bad_words: `bad_word_tokens` of the request's bad words.
        """
        self._vocab = vocab_size
        self._trace = params.trace_decode_token_ids or ()
        self._min_tokens = params.min_tokens
        self._allowed: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            self._allowed = token_mask(params.allowed_token_ids, vocab_size)
        self._stops = token_mask([t for t in stop_ids if 0 <= t < vocab_size], vocab_size)
        single = [word[0] for word in bad_words if len(word) == 1]
        self._bad = token_mask(single, vocab_size) if single else None
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for word in bad_words:
            if len(word) > 1:
                self._lasts.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(start) for start in self._lasts})

    def apply(
        self, tokens: Sequence[int], mask: np.ndarray | None = None, *, prompt: int = 0
    ) -> np.ndarray | None:
        """What may follow; takes the same time however long the output is.

        Args:
            tokens: the prompt's and those chosen so far.
            mask: what else restricts the choice, such as a grammar; changed in place.
            prompt: how many of the tokens are the prompt's.

        Returns:
            uint32 [W], or None when every token is allowed.
        """
        count = len(tokens) - prompt
        if count < len(self._trace):
            return token_mask([self._trace[count]], self._vocab)
        if self._allowed is not None:
            mask = (
                self._allowed.copy() if mask is None else np.bitwise_and(mask, self._allowed, mask)
            )
        if count < self._min_tokens:
            mask = self._without(mask, self._stops)
        if self._bad is not None:
            mask = self._without(mask, self._bad)
        lasts: list[int] = []
        for length in self._lengths:
            if length > count:
                break
            lasts += self._lasts.get(tuple(tokens[len(tokens) - length :]), ())
        if lasts:
            mask = self._without(mask, token_mask(lasts, self._vocab))
        return mask

    def _without(self, mask: np.ndarray | None, forbidden: np.ndarray) -> np.ndarray:
        if mask is None:
            mask = full_mask(self._vocab)
        return np.bitwise_and(mask, ~forbidden, mask)


def bad_word_tokens(
    words: Sequence[str], encode: Callable[[str], Sequence[int]], vocab_size: int
) -> list[list[int]]:
    """Tokens of each word, at the start of a text and, where they differ, after a space.

    The form after a space counts, as in vLLM, when it has as many tokens and another first one.

    Args:
        words: of `SamplingParams.bad_words`.
        encode: text to tokens, without special ones.

    Raises:
        EngineError: a word without tokens or outside the vocabulary, or too many words.
    """
    found: list[list[int]] = []
    for word in words:
        plain, spaced = (list(map(int, encode(f"{s}{word.lstrip()}"))) for s in ("", " "))
        if not plain:
            raise EngineError(f"bad_words={[word]!r} must be words that have at least one token")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
        if len(found) > MAX_BAD_WORDS:
            raise EngineError(
                f"bad_words: {len(words)} words make more than {MAX_BAD_WORDS} token sequences, "
                "which is all that are looked for; give fewer"
            )
    wrong = sorted({token for tokens in found for token in tokens if token >= vocab_size})
    if wrong:
        raise EngineError(f"bad_words: tokens {wrong} are not in the model's {vocab_size}")
    return found
