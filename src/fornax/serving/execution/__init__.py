"""Execution: models on devices, from weights and compiled programs to answered requests."""

from fornax.serving.execution.counters import BatchCount, ModelStatistics
from fornax.serving.execution.pool import DevicePool

__all__ = ["BatchCount", "DevicePool", "ModelStatistics"]
