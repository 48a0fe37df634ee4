"""`fornax diffusion quickstart`: from this machine's fonts to a model that draws letters."""

import dataclasses

from fornax.quickstart.letters.config import SIZES, LettersQuickstartConfig

_HELP = f"""Train a flow model on letters, with no network and no files, and see how good it is.

It draws letters of the fonts that matplotlib ships, with some pairs of letter and style held out,
trains a small transformer to draw them by name ("bold serif R"), judges its letters over training,
guidance and steps, looks for copies of training images, films the sampler, exports the denoise
function, serves it and samples through the server, and writes report.html in the run directory.
Run again, it resumes where it stopped.

--size small takes {SIZES["small"].minutes}, --size tiny {SIZES["tiny"].minutes}.

examples:
  fornax diffusion quickstart
  fornax diffusion quickstart --size tiny --run-dir runs/try
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(LettersQuickstartConfig):
    __doc__ = _HELP


def run(arguments: Arguments) -> int:
    """Run every stage that is not done yet."""
    from fornax.quickstart.letters.pipeline import run as run_quickstart

    return run_quickstart(arguments)
