"""`fornax quickstart`: from the text on this machine to a tuned model that is served."""

import dataclasses

from fornax.quickstart import SIZES, QuickstartConfig
from fornax.quickstart import run as run_quickstart

_HELP = f"""Take real text to a tuned model that other tools load, with no network and no files.

It gathers the Python standard library's source on this machine, trains a tokenizer, writes shards,
pretrains a small decoder with checkpoints, scores held-out files in bits per byte beside gzip and
xz, saves a Hugging Face directory and checks its logits. Then it cuts functions from the files,
tunes adapters on them, rewards the bodies it writes when a parser accepts them, shows what that
gained on held-out functions, serves the tuned model, exports its scoring function and serves that
too, and writes report.html in the run directory.
Run again, it resumes where it stopped.

On two cores --size small takes {SIZES["small"].minutes}, --size tiny {SIZES["tiny"].minutes}.

examples:
  fornax quickstart
  fornax quickstart --size tiny --run-dir runs/try
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(QuickstartConfig):
    __doc__ = _HELP


def run(arguments: Arguments) -> int:
    """Run every stage that is not done yet."""
    return run_quickstart(arguments)
