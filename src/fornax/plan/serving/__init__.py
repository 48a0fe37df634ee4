"""Serving a model: does it fit, how many sequences, how fast, what binds."""

from fornax.plan.serving.engine import ServingConfig
from fornax.plan.serving.plan import plan_serve
from fornax.plan.serving_facts import ServePlan

__all__ = ["ServePlan", "ServingConfig", "plan_serve"]
