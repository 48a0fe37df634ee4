"""How well a model draws what it is asked for: letters read by the judge, and copies looked for.

Shapes: B images, H height and width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fornax.diffusion.letters import FONTS, LETTERS, Judge, Letters
from fornax.diffusion.load import LoadedRun

__all__ = ["Asked", "asked", "draw_all", "nearest", "score"]

_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Prompts, and what the judge should read."""

    prompts: tuple[str, ...]
    letter: NDArray[np.int64]
    style: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    """Whether training never saw the pair."""


def asked(each: int) -> Asked:
    """Every pair of letter and style: `each` times those held out, an eighth of it the others."""
    styles = tuple(FONTS)
    rows = [
        (letter, style, held)
        for held, times in ((False, max(1, each // 8)), (True, each))
        for letter, style in Letters(held_out=held).pairs
        for _ in range(times)
    ]
    return Asked(
        prompts=tuple(f"{styles[style]} {LETTERS[letter]}" for letter, style, _ in rows),
        letter=np.array([row[0] for row in rows]),
        style=np.array([row[1] for row in rows]),
        held_out=np.array([row[2] for row in rows]),
    )


def draw_all(
    run: LoadedRun, prompts: Sequence[str], *, seed: int, steps: int, guidance: float
) -> NDArray[np.float32]:
    """(B, H, H, 1) images of prompts, in batches of one size so that one program draws them."""
    size = min(_BATCH, len(prompts))
    drawn = []
    for number, start in enumerate(range(0, len(prompts), size)):
        part = list(prompts[start : start + size])
        filled = part + [part[0]] * (size - len(part))
        images = run.draw(filled, seed=seed + number, steps=steps, guidance=guidance)
        drawn.append(images[: len(part)])
    return np.concatenate(drawn)


def score(judge: Judge, images: NDArray[np.float32], wanted: Asked) -> dict[str, float]:
    """Shares of images that are right: letter and style, of all pairs and of those held out."""
    found = judge.judge(images)
    letter = found.letter == wanted.letter
    both = letter & (found.style == wanted.style)
    held = wanted.held_out
    return {
        "letter": float(letter[~held].mean()),
        "both": float(both[~held].mean()),
        "held_out_letter": float(letter[held].mean()),
        "held_out_both": float(both[held].mean()),
    }


def nearest(
    images: NDArray[np.float32], others: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each image its nearest of others: index, and root mean square of the difference."""
    rows, bank = (x.reshape(len(x), -1).astype(np.float64) for x in (images, others))
    squares = (rows**2).sum(1)[:, None] - 2 * rows @ bank.T + (bank**2).sum(1)[None]
    index = squares.argmin(1)
    least = np.maximum(squares[np.arange(len(rows)), index], 0)
    return index, np.sqrt(least / rows.shape[1])


def summary(values: NDArray[np.float64]) -> dict[str, Any]:
    """Median and least of distances."""
    return {"median": float(np.median(values)), "least": float(values.min())}
