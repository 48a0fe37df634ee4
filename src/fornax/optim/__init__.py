"""Optimizers: an Optax chain declared in config, from clipping to averages of the parameters."""

from fornax.optim.build import Built, build
from fornax.optim.config import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    AdaptiveClip,
    Clip,
    Group,
    Lion,
    Lookahead,
    Muon,
    NormClip,
    OptimConfig,
    Optimizer,
    RMSProp,
    Shampoo,
    UserOptimizer,
    ValueClip,
)
from fornax.optim.schedules import (
    WSD,
    Constant,
    Cosine,
    Linear,
    Piecewise,
    Schedule,
    build_schedule,
)
from fornax.optim.shampoo import scale_by_shampoo
from fornax.optim.soap import scale_by_soap
from fornax.optim.views import View

__all__ = [
    "EMA",
    "SGD",
    "SOAP",
    "WSD",
    "Adafactor",
    "AdamW",
    "AdaptiveClip",
    "Built",
    "Clip",
    "Constant",
    "Cosine",
    "Group",
    "Linear",
    "Lion",
    "Lookahead",
    "Muon",
    "NormClip",
    "OptimConfig",
    "Optimizer",
    "Piecewise",
    "RMSProp",
    "Schedule",
    "Shampoo",
    "UserOptimizer",
    "ValueClip",
    "View",
    "build",
    "build_schedule",
    "scale_by_shampoo",
    "scale_by_soap",
]
