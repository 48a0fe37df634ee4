"""Two captures compared: what got slower, by how much, from which line."""

from fornax.profile.compare.run import compare
from fornax.profile.compare.samples import Sampled, Samples, sample
from fornax.profile.compare.times import least_seconds
from fornax.profile.compare.types import Change, Comparison, Side
from fornax.profile.compare.verdict import figures, verdict

__all__ = [
    "Change",
    "Comparison",
    "Sampled",
    "Samples",
    "Side",
    "compare",
    "figures",
    "least_seconds",
    "sample",
    "verdict",
]
