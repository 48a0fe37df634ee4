"""What a training step holds, computes and exchanges, in closed form: no compiler, no device."""

from fornax.plan.closed_form.step import kernel_choices, step_facts

__all__ = ["kernel_choices", "step_facts"]
