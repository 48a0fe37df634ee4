"""Letters by index: each index draws the same letter, style, colours, size and place everywhere."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import ConfigError, DataError
from fornax.diffusion.letters.drawing import COLOURS, FONTS, LETTERS, ink

__all__ = ["Letter", "Letters"]

STYLES = tuple(FONTS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Letter:
    """One example.

    Attributes:
      image: (H, H, C) float32 in [-1, 1]; C is 1 (ink bright on dark) or 3.
      prompt: "bold serif R", in colour "bold serif R in red on white".
      letter: index into `LETTERS`.
      style: index into the styles, in the order of `FONTS`.
      colours: names of the letter's and the ground's colour; None in grey.
    """

    image: NDArray[np.float32]
    prompt: str
    letter: int
    style: int
    colours: tuple[str, str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Letters:
    """A data set of `count` examples: grey 16 x 16, in colour 32 x 32; it takes integer indices.

    Every letter has one style that is held out: pairs that training never sees, of letters and
    styles that it does.

    Attributes:
      colour: three channels, with the colours in the prompt.
      size: height and width; 0 stands for 16 in grey and 32 in colour.
      held_out: draw the held-out pairs instead of the others.
      count: how many examples.
      seed: another seed gives other examples of the same pairs.

    Raises:
      ConfigError: a size below 8, at which letters are not legible, or no example.
    """

    colour: bool = False
    size: int = 0
    held_out: bool = False
    count: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.size and self.size < 8) or self.count < 1:
            raise ConfigError(
                f"size={self.size}, count={self.count}; use a size of at least 8 (0 for the usual "
                "one) and a count of at least 1"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, H, C) of an image."""
        size = self.size or (32 if self.colour else 16)
        return size, size, 3 if self.colour else 1

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of letter and style that this set draws: 182, or the 26 held out."""
        return [
            (letter, style)
            for letter in range(len(LETTERS))
            for style in range(len(STYLES))
            if (style == held_out_style(letter)) == self.held_out
        ]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Letter:
        """Example `index`, from 0.

        Raises:
          DataError: outside the set.
        """
        if not 0 <= index < self.count:
            raise DataError(f"letter {index} of {self.count}; indices are 0 to {self.count - 1}")
        random = np.random.default_rng([self.seed, index, self.held_out])
        pairs = self.pairs
        letter, style = pairs[random.integers(len(pairs))]
        scale = random.uniform(0.8, 1.05)
        shift = (random.uniform(-0.06, 0.06), random.uniform(-0.06, 0.06))
        cover = ink(LETTERS[letter], STYLES[style], self.shape[0], scale, shift)
        words = f"{STYLES[style]} {LETTERS[letter]}"
        if not self.colour:
            return Letter(
                image=2 * cover[..., None] - 1,
                prompt=words,
                letter=letter,
                style=style,
                colours=None,
            )
        front, ground = (str(name) for name in random.choice(list(COLOURS), 2, replace=False))
        light, dark = (np.array(COLOURS[name], np.float32) / 127.5 - 1 for name in (front, ground))
        return Letter(
            image=(dark + cover[..., None] * (light - dark)).astype(np.float32),
            prompt=f"{words} in {front} on {ground}",
            letter=letter,
            style=style,
            colours=(front, ground),
        )


def held_out_style(letter: int) -> int:
    """The style of a letter that training does not see; each style of three or four letters."""
    return (letter * 3 + letter // len(STYLES)) % len(STYLES)
