"""Goodput of a run with failures: a simulator that picks tiers, snapshot interval and spares."""

from fornax.plan.goodput.inputs import RunSpec, Tier
from fornax.plan.goodput.measured import Measured, measure
from fornax.plan.goodput.report import print_goodput, write_goodput
from fornax.plan.goodput.search import GoodputPlan, plan_goodput

__all__ = [
    "GoodputPlan",
    "Measured",
    "RunSpec",
    "Tier",
    "measure",
    "plan_goodput",
    "print_goodput",
    "write_goodput",
]
