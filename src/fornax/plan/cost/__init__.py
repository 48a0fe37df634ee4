"""Chip, topology and operations to seconds."""

from fornax.plan.cost.calibration import CALIBRATIONS, Calibration, calibration_of, network_of
from fornax.plan.cost.network import (
    Network,
    PhysicalAxis,
    Span,
    Transfer,
    collective_seconds,
)
from fornax.plan.cost.placement import axis_span, place
from fornax.plan.cost.predict import (
    CategoryTime,
    CollectiveTime,
    Prediction,
    predict,
    predict_schedule,
)
from fornax.plan.cost.span import permute_span, span_of, spans_of

__all__ = [
    "CALIBRATIONS",
    "Calibration",
    "CategoryTime",
    "CollectiveTime",
    "Network",
    "PhysicalAxis",
    "Prediction",
    "Span",
    "Transfer",
    "axis_span",
    "calibration_of",
    "collective_seconds",
    "network_of",
    "permute_span",
    "place",
    "predict",
    "predict_schedule",
    "span_of",
    "spans_of",
]
