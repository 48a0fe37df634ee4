"""Letters drawn from matplotlib's fonts: prompts, images by index, and a judge. No network, no JAX.

letters = Letters()
letters[7].prompt       # "bold serif R"
Judge(letters).judge(images)
"""

from fornax.diffusion.letters.dataset import Letter, Letters
from fornax.diffusion.letters.drawing import COLOURS, FONTS, LETTERS
from fornax.diffusion.letters.judge import Judge, Judgement

__all__ = ["COLOURS", "FONTS", "LETTERS", "Judge", "Judgement", "Letter", "Letters"]
