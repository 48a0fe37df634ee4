"""The facts of steps of any model, from their traces: what closed forms are for decoders."""

from fornax.plan.traced.jaxpr import Traced, walk
from fornax.plan.traced.step import Sampled, TracedStep, forward_facts, held_bytes, train_facts

__all__ = ["Sampled", "Traced", "TracedStep", "forward_facts", "held_bytes", "train_facts", "walk"]
