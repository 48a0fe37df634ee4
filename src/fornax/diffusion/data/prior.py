"""Prior preservation: images of the class beside those of the subject (Ruiz et al. 2023).

A network that is tuned on few images of one dog with "a photo of sks dog" continues knowing what
any "a photo of a dog" looks like, since it is shown as many of those.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fornax.diffusion.data.buckets import Size
from fornax.diffusion.data.examples import Examples

__all__ = ["WithPrior"]


class WithPrior:
    """Two sets of images as one of equal shares: the smaller one is repeated.

    Args:
      subject: what is learnt.
      prior: what is kept.
      weight: of an example of `prior` in the loss, beside 1.
    """

    def __init__(self, subject: Examples, prior: Examples, weight: float):
        self._sets, self._weight = (subject, prior), weight
        counts = len(subject.bucket), len(prior.bucket)
        self._places = [
            (number, index)
            for number, count in enumerate(counts)
            for _ in range(max(1, round(max(counts) / count)))
            for index in range(count)
        ]
        self.sizes: Sequence[Size] = sorted({*subject.sizes, *prior.sizes})
        self.channels = subject.channels
        self.bucket = np.asarray(
            [
                self.sizes.index(self._sets[number].sizes[self._sets[number].bucket[index]])
                for number, index in self._places
            ]
        )
        self.identity = f"{subject.identity} {prior.identity} {weight:g}"

    def _of(self, index: int) -> tuple[Examples, int]:
        number, place = self._places[index]
        return self._sets[number], place

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        """As of the set."""
        examples, place = self._of(index)
        return examples.get(place, mirrored=mirrored, rng=rng)

    def arrays(
        self, index: int, *, dropped: bool = False, mirrored: bool = False
    ) -> dict[str, NDArray[Any]]:
        """As of the set."""
        examples, place = self._of(index)
        return examples.arrays(place, dropped=dropped, mirrored=mirrored)

    def caption(self, index: int) -> str:
        """As of the set."""
        examples, place = self._of(index)
        return examples.caption(place)

    def weight(self, index: int) -> float:
        """1, or that of the prior."""
        return self._weight if self._places[index][0] else 1.0

    def content(self, index: int) -> str:
        """As of the set."""
        examples, place = self._of(index)
        return examples.content(place)

    def frame(self, index: int) -> tuple[int, ...]:
        """As of the set."""
        examples, place = self._of(index)
        return examples.frame(place)

    def texts(self) -> Iterable[str]:
        """Captions of both."""
        return (*self._sets[0].texts(), *self._sets[1].texts())
