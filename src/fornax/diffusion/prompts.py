"""How captions become conditions when a model learns them from nothing: words, or labels.

Legend: B captions, S words of a caption, D width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError, DataError
from fornax.config.suggest import did_you_mean, first_few
from fornax.diffusion.models import Condition
from fornax.models.scope import scoped

__all__ = ["LabelsConfig", "Prompts", "TextConfig", "WordEncoder", "WordsConfig"]

_PADDING, _EMPTY, _FIRST = 0, 1, 2
"""Ids of padding, of the empty caption's one token, and of the first word."""


@dataclass(frozen=True, kw_only=True)
class WordsConfig:
    """A learned vector for each word of the captions, trained with the network."""

    type: Literal["words"] = "words"
    width: int = 128
    """Of a word's vector, and so of what the network is conditioned on."""
    length: int = 16
    """Words of a caption; a longer one is refused."""
    most: int = 20_000
    """Different words; captions with more are refused."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("width", "length", "most"):
            if getattr(self, name) < 1:
                raise ConfigError(f"text.{name}={getattr(self, name)} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class LabelsConfig:
    """Each caption is one class."""

    type: Literal["labels"] = "labels"


TextConfig = WordsConfig | LabelsConfig


@dataclass(frozen=True)
class Prompts:
    """Captions to integers."""

    config: TextConfig
    known: tuple[str, ...]
    """The words, or the labels, in order."""

    @classmethod
    def of(cls, config: TextConfig, texts: Iterable[str]) -> "Prompts":
        """Learn what is in some captions.

        Raises:
          DataError: nothing, or more words than `most`.
        """
        if isinstance(config, WordsConfig):
            known = sorted({word for text in texts for word in text.split()})
            if len(known) > config.most:
                raise DataError(
                    f"the captions have {len(known)} different words, and text.most is "
                    f"{config.most}; raise it, or shorten the captions"
                )
        else:
            known = sorted({text for text in texts if text})
        if not known:
            raise DataError(
                "the captions are all empty, and text is set; write captions, or set text to null"
            )
        return cls(config, tuple(known))

    @property
    def count(self) -> int:
        """Rows of the table of words, or classes; of classes the empty one is one more."""
        return len(self.known) + (_FIRST if isinstance(self.config, WordsConfig) else 0)

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Arrays of a batch: `words` int32 [B, S], or `classes` int32 [B].

        The empty caption is the condition that dropout leaves.

        Raises:
          DataError: a word or label that training never saw; a caption that is too long.
        """
        places = {word: number for number, word in enumerate(self.known)}
        if not isinstance(self.config, WordsConfig):
            classes = [len(self.known) if not c else self._place(places, c) for c in captions]
            return {"classes": np.asarray(classes, np.int32)}
        length = self.config.length
        found = np.full((len(captions), length), _PADDING, np.int32)
        for row, caption in zip(found, captions, strict=True):
            words = caption.split()
            if len(words) > length:
                raise DataError(
                    f"the caption {caption!r:.80} has {len(words)} words, and text.length is "
                    f"{length}; shorten it, or train with a larger text.length"
                )
            ids = [_FIRST + self._place(places, word) for word in words] or [_EMPTY]
            row[: len(ids)] = ids
        return {"words": found}

    def _place(self, places: dict[str, int], word: str) -> int:
        found = places.get(word)
        if found is None:
            knows = f"it knows {first_few(self.known, 12)}"
            raise DataError(
                f"{word!r} is in no caption that the model was trained on; "
                f"{did_you_mean(word, self.known, knows)}"
            )
        return found


class WordEncoder(nnx.Module):
    """A table of words: their vectors, and their sum for the whole caption.

    Attributes:
      table: [rows, D], float32.
    """

    def __init__(self, rows: int, width: int, *, rngs: nnx.Rngs, compute_dtype: DTypeLike):
        """Draw the table of a unit normal, so that words count from the first step."""
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (rows, width), jnp.float32), axes=("vocab", "embed")
        )
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(self, words_BS: jax.Array) -> Condition:
        """Look up int32 words -> `text_BSD`, `text_mask_BS` and `pooled_BD`."""
        mask_BS = (words_BS != _PADDING).astype(jnp.int32)
        text_BSD = jnp.take(self.table[...], words_BS, axis=0) * mask_BS[..., None]
        return Condition(
            text_BSD=text_BSD.astype(self.compute_dtype),
            text_mask_BS=mask_BS,
            pooled_BD=jnp.sum(text_BSD, 1).astype(self.compute_dtype),
        )


def text_arrays(prompts: Prompts | None, captions: Sequence[str]) -> dict[str, Any]:
    """Arrays of a batch for captions; none for a model without text."""
    return {} if prompts is None else prompts.encode(captions)
