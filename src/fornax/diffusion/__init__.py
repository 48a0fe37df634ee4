"""Diffusion and flow models: noise schedules, samplers, guidance, objectives, and drawn letters.

The parts take functions of arrays and do not depend on a model: `schedules` and `samplers` make
tables, `sample` runs one, `guidance` and `predictions` wrap a network for it, `objectives` trains
it.
"""

from fornax.diffusion.guidance import guided, perpendicular
from fornax.diffusion.metrics import FeatureStatistics, KernelDistance, clip_score, fid, kid
from fornax.diffusion.objectives import Objective, example_noise, example_uniform, stratified
from fornax.diffusion.predictions import Point, Prediction
from fornax.diffusion.samplers import SAMPLERS, Table
from fornax.diffusion.sampling import inpaint, noised, sample
from fornax.diffusion.schedules import Discrete, Schedule, edm, flow
from fornax.optim.averages import (
    Averages,
    average_with,
    power_decay,
    power_exponent,
    reconstruct,
    warmed_up,
)

__all__ = [
    "SAMPLERS",
    "Averages",
    "Discrete",
    "FeatureStatistics",
    "KernelDistance",
    "Objective",
    "Point",
    "Prediction",
    "Schedule",
    "Table",
    "average_with",
    "clip_score",
    "edm",
    "example_noise",
    "example_uniform",
    "fid",
    "flow",
    "guided",
    "inpaint",
    "kid",
    "noised",
    "perpendicular",
    "power_decay",
    "power_exponent",
    "reconstruct",
    "sample",
    "stratified",
    "warmed_up",
]
