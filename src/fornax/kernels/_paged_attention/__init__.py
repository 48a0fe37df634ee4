"""Attention over a paged cache, and the writes and copies that keep such a cache."""

from fornax.kernels._paged_attention.cache import copy_pages, paged_write, paged_write_operation
from fornax.kernels._paged_attention.operation import paged_attention, paged_attention_operation

__all__ = [
    "copy_pages",
    "paged_attention",
    "paged_attention_operation",
    "paged_write",
    "paged_write_operation",
]
