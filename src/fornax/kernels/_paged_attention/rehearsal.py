"""Made-up paged attention calls, for measuring implementations against each other.

Legend: T tokens of the step, R rows (sequences), W pages of a table's row, S slots of a page,
L layers, P pages, C = 2 x key heads, H head width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels._paged_attention.call import PagedCall, PagedInputs

__all__ = ["rehearse"]

_LONGEST = 1024
"""Tokens of context at most: enough to tell implementations apart, little to allocate."""


def rehearse(call: PagedCall, run: Callable[[PagedInputs], jax.Array]) -> Callable[[], Any]:
    """Return a function that computes one call like `call`, its tokens spread over its rows."""
    rng = np.random.default_rng(0)
    S, W = call.page_size, call.table_width
    rows = min(call.rows, call.tokens)
    pages = min(W, max(1, _LONGEST // S))
    start_R1 = np.full(call.rows + 1, call.tokens, np.int32)
    start_R1[: rows + 1] = np.arange(rows + 1) * call.tokens // rows
    counts_R = np.diff(start_R1)
    context_R = np.where(counts_R > 0, np.maximum(counts_R, pages * S), 0)
    table_RW = np.zeros((call.rows, W), np.int32)
    table_RW[:, :pages] = 1 + np.arange(call.rows * pages).reshape(call.rows, pages) % (4 * pages)
    kv_LPSCH = jnp.asarray(
        rng.normal(size=(1, 1 + 4 * pages, S, 2 * call.kv_heads, call.head_dim)), call.cache_dtype
    )
    q_TNH = jnp.asarray(rng.normal(size=(call.tokens, call.heads, call.head_dim)), call.dtype)
    sinks_N = jnp.zeros(call.heads) if call.sinks else None

    @jax.jit
    def step(q_TNH: jax.Array, kv_LPSCH: jax.Array) -> jax.Array:
        return run(
            PagedInputs(
                q_TNH=q_TNH,
                kv_LPSCH=kv_LPSCH,
                layer=jnp.asarray(0, jnp.int32),
                page_table_RW=jnp.asarray(table_RW),
                query_start_R1=jnp.asarray(start_R1),
                context_lens_R=jnp.asarray(context_R, jnp.int32),
                sinks_N=sinks_N,
                scale=call.head_dim**-0.5,
                window=call.window,
                softcap=call.softcap,
            )
        )

    return lambda: step(q_TNH, kv_LPSCH)
