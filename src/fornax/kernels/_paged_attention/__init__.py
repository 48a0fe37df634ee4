"""Attention over a paged cache, and the writes and copies that keep such a cache."""

from fornax.kernels._paged_attention.cache import copy_pages, paged_write, paged_write_operation
from fornax.kernels._paged_attention.call import PreparedAttention
from fornax.kernels._paged_attention.codes import (
    Pages,
    QuantizedPages,
    cache_has_codes,
    cache_vector_bytes,
    empty_pages,
    page_specs,
)
from fornax.kernels._paged_attention.operation import (
    paged_attention,
    paged_attention_operation,
    paged_attention_update,
    prepare_paged_attention,
)
from fornax.kernels._paged_attention.tpu import paged_head_layout

__all__ = [
    "Pages",
    "PreparedAttention",
    "QuantizedPages",
    "cache_has_codes",
    "cache_vector_bytes",
    "copy_pages",
    "empty_pages",
    "page_specs",
    "paged_attention",
    "paged_attention_operation",
    "paged_attention_update",
    "paged_head_layout",
    "paged_write",
    "paged_write_operation",
    "prepare_paged_attention",
]
