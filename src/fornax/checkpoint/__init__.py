"""Checkpoints: a run's arrays, data position and config, saved asynchronously as one step."""

from fornax.checkpoint.checkpointer import Checkpointer, Restored
from fornax.checkpoint.config import CheckpointConfig

__all__ = ["CheckpointConfig", "Checkpointer", "Restored"]
