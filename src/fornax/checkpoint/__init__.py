"""Checkpoints: a run's arrays, data position and config, saved asynchronously as one step."""

from fornax.checkpoint.arrays import forget_group
from fornax.checkpoint.checkpointer import Checkpointer, Restored
from fornax.checkpoint.retention import CheckpointConfig

__all__ = ["CheckpointConfig", "Checkpointer", "Restored", "forget_group"]
