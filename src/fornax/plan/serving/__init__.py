"""Serving a model: does it fit, how many sequences, how fast, what binds."""

from fornax.plan.serving.config import ServingConfig
from fornax.plan.serving.data import ServePlan
from fornax.plan.serving.page import write_page
from fornax.plan.serving.serve import plan_serve
from fornax.plan.serving.terminal import render_table, too_large_words, write_json

__all__ = [
    "ServePlan",
    "ServingConfig",
    "plan_serve",
    "render_table",
    "too_large_words",
    "write_json",
    "write_page",
]
