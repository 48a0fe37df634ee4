"""Tuning of a folder of diffusers, or a run, on other images or videos."""

from fornax.diffusion.tuning.run import tune

__all__ = ["tune"]
