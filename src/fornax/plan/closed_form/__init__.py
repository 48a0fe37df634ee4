"""What a training step holds, computes and exchanges, in closed form: no compiler, no device."""

from fornax.plan.closed_form.shards import EVEN, routed
from fornax.plan.closed_form.step import expert_text, kernel_choices, step_facts

__all__ = ["EVEN", "expert_text", "kernel_choices", "routed", "step_facts"]
