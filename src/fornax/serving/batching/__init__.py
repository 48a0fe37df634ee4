"""Batching: which waiting requests are computed together, and whose turn it is."""

from fornax.serving.batching.plan import RowPlan
from fornax.serving.batching.queue import Batch, Key, Queue, Waiting
from fornax.serving.batching.shares import Limit, Share, Shares

__all__ = ["Batch", "Key", "Limit", "Queue", "RowPlan", "Share", "Shares", "Waiting"]
