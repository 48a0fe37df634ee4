"""Judges images of letters by templates of every letter and style at many sizes and places.

Shapes: B images, H height and width, C channels, N templates of P = H * H pixels.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import DataError
from fornax.diffusion.letters.dataset import STYLES, Letters
from fornax.diffusion.letters.drawing import COLOURS, LETTERS, SAMPLES, pixels, samples

__all__ = ["Judge", "Judgement"]

SIDE = 16
"""Images are compared at this height and width: larger ones by means of blocks."""
GRID = 6
"""Sizes, and places along each axis, of the templates of one pair."""
STEP = 2
"""Points of which a pixel has `SAMPLES` along an axis, from one place to the next."""
CANDIDATES = 6
"""Pairs that are looked at closely."""
ACCEPT = 0.85
"""The least correlation with a template that passes for a letter."""
CONTRAST = 0.2
"""The least standard deviation of ink over an image, in its range of 2; clean letters have 0.45."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Judgement:
    """What is in each image.

    Attributes:
      letter: (B,) index into `LETTERS`, or -1 where there is none.
      style: (B,) index into the styles, or -1.
      front: (B,) index into `COLOURS`, of the letter's colour, or -1; -1 in grey.
      ground: (B,) the same of the ground's.
      score: (B,) correlation with the best template, in [-1, 1].
    """

    letter: NDArray[np.int64]
    style: NDArray[np.int64]
    front: NDArray[np.int64]
    ground: NDArray[np.int64]
    score: NDArray[np.float32]


class Judge:
    """Finds the template that correlates best; a process draws them once, in about a second.

    Args:
      letters: the set whose images are judged; only its shape counts.
    """

    def __init__(self, letters: Letters) -> None:
        self.shape = letters.shape
        self._bank = _templates()

    def judge(self, images: NDArray[np.float32]) -> Judgement:
        """Judge (B, H, H, C) images in [-1, 1].

        An image without contrast, or unlike every template, holds no letter: blanks and noise.

        Raises:
          DataError: images of another shape.
        """
        images = np.asarray(images, np.float32)
        if images.shape[1:] != self.shape:
            raise DataError(
                f"images of shape {images.shape} for a judge of {('B', *self.shape)}; make the "
                "judge with the Letters that they are like"
            )
        images = np.nan_to_num(np.clip(images, -1, 1))
        cover, front, ground = _grey(images) if self.shape[2] == 1 else _colours(images)
        pixels, deviation = _normalised(_to_side(cover).reshape(len(cover), -1))
        parts = [self._best(pixels[start : start + 256]) for start in range(0, len(pixels), 256)]
        pair = np.concatenate([pair for pair, _ in parts])
        score = np.concatenate([score for _, score in parts])
        holds = (score >= ACCEPT) & (deviation >= CONTRAST)
        letter, style = np.divmod(pair, len(STYLES))
        return Judgement(
            letter=np.where(holds, letter, -1),
            style=np.where(holds, style, -1),
            front=np.where(holds, front, -1),
            ground=np.where(holds, ground, -1),
            score=score,
        )

    def _best(self, rows_BP: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The pair that fits best, and the correlation of its nearest template.

        Of the pairs whose templates come nearest, each is fitted by its nearest template and how
        that changes with size and place (tangent distance, Simard et al. 1993), since a grid of
        templates alone is too coarse to tell two weights of one letter apart.
        """
        pairs = len(self._bank)
        nearest = (rows_BP @ self._bank.reshape(-1, rows_BP.shape[1]).T).reshape(
            len(rows_BP), pairs, -1
        )
        inner, score = nearest.argmax(2), nearest.max(2)
        top = np.argsort(-score, 1)[:, :CANDIDATES]
        fits = np.stack(
            [self._fit(rows_BP, pair, inner[np.arange(len(pair)), pair]) for pair in top.T], 1
        )
        return top[np.arange(len(top)), fits.argmax(1)], score.max(1)

    def _fit(
        self, rows_BP: NDArray[np.float32], pair: NDArray[np.int64], inner: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """(B,) squared correlation of each row with the best in its template's tangent space."""
        place = np.stack(np.unravel_index(inner, (GRID, GRID, GRID)), 1)
        basis = [self._bank[(pair, *place.T)]]
        for axis in range(3):
            step = np.eye(3, dtype=int)[axis]
            up, down = np.minimum(place + step, GRID - 1), np.maximum(place - step, 0)
            basis.append(self._bank[(pair, *up.T)] - self._bank[(pair, *down.T)])
        basis_BKP = np.stack(basis, 1).astype(np.float64)
        gram = basis_BKP @ basis_BKP.transpose(0, 2, 1) + 1e-6 * np.eye(4)
        right = np.einsum("bkp,bp->bk", basis_BKP, rows_BP)
        return np.einsum("bk,bk->b", right, np.linalg.solve(gram, right[..., None])[..., 0])


@functools.cache
def _templates() -> NDArray[np.float32]:
    """Templates of mean 0 and length 1: letter and style, scale, place along y and x, pixels.

    Places are `STEP` points apart, so all those of one size are cut from one larger field.
    """
    margin = STEP * (GRID - 1) // 2
    fields = np.stack(
        [
            samples(letter, style, SIDE, scale, margin=margin)
            for letter in LETTERS
            for style in STYLES
            for scale in np.linspace(0.78, 1.08, GRID)
        ]
    )
    bank = np.empty((len(fields), GRID, GRID, SIDE, SIDE), np.float32)
    for y, x in np.ndindex(GRID, GRID):
        rows, columns = (slice(STEP * i, STEP * i + SAMPLES * SIDE) for i in (y, x))
        bank[:, y, x] = pixels(fields[:, rows, columns])
    pairs = len(LETTERS) * len(STYLES)
    return _normalised(bank.reshape(-1, SIDE * SIDE))[0].reshape(pairs, GRID, GRID, GRID, -1)


def _normalised(rows: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows of mean 0 and length 1, and the standard deviations that they had."""
    rows = rows - rows.mean(1, keepdims=True)
    deviation = rows.std(1)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(length > 0, length, 1)).astype(np.float32), deviation


def _to_side(cover: NDArray[np.float32]) -> NDArray[np.float32]:
    """(B, SIDE, SIDE) means of blocks of (B, H, H), or interpolation where H is not a multiple."""
    size = cover.shape[1]
    if size % SIDE == 0:
        block = size // SIDE
        return cover.reshape(-1, SIDE, block, SIDE, block).mean((2, 4))
    from PIL import Image

    box = Image.Resampling.BOX if size > SIDE else Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(one).resize((SIDE, SIDE), box)) for one in cover])


Parts = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]


def _grey(images: NDArray[np.float32]) -> Parts:
    """Ink of grey images, and no colours."""
    none = np.full(len(images), -1)
    return images[..., 0], none, none


def _colours(images: NDArray[np.float32]) -> Parts:
    """Ink along the line between two named colours, and their indices.

    The ground is the colour nearest to the border's median; the letter's, the one that most of the
    pixels far from the ground are nearest to.
    """
    names = np.array(list(COLOURS.values()), np.float32) / 127.5 - 1
    border = np.concatenate(
        [images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], axis=1
    )
    ground = _nearest(np.median(border, 1), names)
    pixels = images.reshape(len(images), -1, 3)
    away = np.linalg.norm(pixels - names[ground][:, None], axis=-1)
    count = max(1, pixels.shape[1] // 20)
    far = np.take_along_axis(pixels, np.argsort(-away, 1)[:, :count, None], 1)
    front = _nearest(np.median(far, 1), names)
    line = names[front] - names[ground]
    length = np.maximum((line**2).sum(-1), 1e-6)
    share = np.einsum("bpc,bc->bp", pixels - names[ground][:, None], line) / length[:, None]
    cover = (2 * share - 1).reshape(images.shape[:3]).astype(np.float32)
    cover[front == ground] = 0
    return np.clip(cover, -1, 1), front, ground


def _nearest(colours: NDArray[np.float32], names: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.linalg.norm(colours[:, None] - names[None], axis=-1).argmin(1)
