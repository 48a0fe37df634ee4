"""What one paged attention call looks like: shapes and options, checked once for all.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, C rows of a slot: 2 K (k0, v0, k1, v1, ...), K where keys are values too, or K of
width 2 H where a key is beside its value; R rows (sequences), W pages of a table's row.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._paged_attention.codes import Pages, QuantizedPages, cache_has_codes
from fornax.kernels.registry import current_platform

__all__ = [
    "NewTokens",
    "PagedCall",
    "PagedInputs",
    "PreparedAttention",
    "WriteCall",
    "check_pages",
    "describe",
]


@dataclass(frozen=True)
class PagedCall:
    """Shapes, dtypes and options of one call: what implementations look at when they decline."""

    platform: str
    tokens: int
    rows: int
    table_width: int
    page_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    cache_dtype: str
    window: int | None
    softcap: float | None
    sinks: bool
    shared: bool
    """Whether keys are values too."""
    joined: bool = False
    """Whether a key and its value are one row of the cache, of width 2 H."""
    capability: float | None = None
    """Compute capability of the GPU that it is for; None: of this machine's, or a Hopper's."""
    scaled: bool = False
    """Whether the cache holds codes, each vector's with a scale."""


@dataclass(frozen=True)
class WriteCall:
    """Shapes and dtypes of one write: what implementations look at when they decline."""

    platform: str
    tokens: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    cache_dtype: str
    shared: bool
    """Whether keys are values too."""
    scaled: bool = False
    """Whether the cache holds codes, each vector's with a scale."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("data",), meta_fields=("implementation",)
)
@dataclass(frozen=True)
class PreparedAttention:
    """What an implementation derived from a step's rows, for all layers of the step."""

    implementation: str
    data: Any
    """A pytree of arrays; None where the implementation derives nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewTokens:
    """A step's keys and values, to be written before anything is read."""

    k_TKH: jax.Array
    v_TKH: jax.Array | None
    """None where keys are values too."""
    slots_T: jax.Array


@dataclass(frozen=True)
class PagedInputs:
    """The arrays and options of one call."""

    q_TNH: jax.Array
    kv_LPSCH: Pages
    layer: jax.Array
    page_table_RW: jax.Array
    query_start_R1: jax.Array
    context_lens_R: jax.Array
    sinks_N: jax.Array | None
    scale: float
    window: int | None
    softcap: float | None
    shared: bool = False
    prepared: PreparedAttention | None = None
    new: NewTokens | None = None

    def prepared_for(self, implementation: str) -> Any:
        """What `implementation` derived from these rows before, or None."""
        if self.prepared is None or self.prepared.implementation != implementation:
            return None
        return self.prepared.data

    @property
    def kv_heads(self) -> int:
        """Key heads that the query heads divide over."""
        C, width = self.kv_LPSCH.shape[3:]
        return C * width // (self.parts * self.q_TNH.shape[2])

    @property
    def joined(self) -> bool:
        """Whether a key and its value are one row of the cache."""
        return not self.shared and self.kv_LPSCH.shape[4] == 2 * self.q_TNH.shape[2]

    @property
    def parts(self) -> int:
        """Vectors that the pages hold of a token and head: key and value, or one that is both."""
        return 1 if self.shared else 2


def describe(inputs: PagedInputs) -> PagedCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes or options that do not fit together.
    """
    _check_shapes(inputs)
    _check_rows(inputs)
    _check_options(inputs)
    T, N, H = inputs.q_TNH.shape
    R, W = inputs.page_table_RW.shape
    return PagedCall(
        platform=current_platform(),
        tokens=T,
        rows=R,
        table_width=W,
        page_size=inputs.kv_LPSCH.shape[2],
        heads=N,
        kv_heads=inputs.kv_heads,
        head_dim=H,
        dtype=jnp.dtype(inputs.q_TNH.dtype).name,
        cache_dtype=jnp.dtype(inputs.kv_LPSCH.dtype).name,
        window=inputs.window,
        softcap=inputs.softcap,
        sinks=inputs.sinks_N is not None,
        shared=inputs.shared,
        joined=inputs.joined,
        scaled=isinstance(inputs.kv_LPSCH, QuantizedPages),
    )


def _check_shapes(inputs: PagedInputs) -> None:
    q, kv = inputs.q_TNH, inputs.kv_LPSCH
    if q.ndim != 3 or kv.ndim != 5:
        raise KernelError(
            f"paged_attention: q{q.shape} and kv{kv.shape} need three and five dimensions: "
            "[T, N, H] and [L, P, S, 2 K, H]"
        )
    T, N, H = q.shape
    if 0 in (T, *kv.shape):
        raise KernelError(f"paged_attention: q{q.shape} and kv{kv.shape} must not be empty")
    if kv.shape[4] != H and not inputs.joined:
        raise KernelError(
            f"paged_attention: q{q.shape} and kv{kv.shape} differ in head width; use one width, "
            "or twice q's for keys beside their values"
        )
    if kv.shape[3] % inputs.parts and not inputs.joined:
        raise KernelError(
            f"paged_attention: kv{kv.shape} must hold each head's key and value side by side: "
            "its fourth dimension is twice the number of key heads"
        )
    if N == 0 or N % inputs.kv_heads:
        raise KernelError(
            f"paged_attention: {N} query heads do not divide over {inputs.kv_heads} key heads; "
            f"use a multiple of {inputs.kv_heads}"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise KernelError(f"paged_attention: q is {q.dtype}; use a floating dtype")
    check_pages("paged_attention", kv, inputs.parts * inputs.kv_heads)


def check_pages(operation: str, kv: Pages, vectors: int) -> None:
    """Check a cache's dtype, and the scales of one of codes.

    Args:
        operation: that is asked for.
        kv: the cache.
        vectors: V of a token.

    Raises:
        KernelError: saying what to use.
    """
    if not isinstance(kv, QuantizedPages):
        if not jnp.issubdtype(kv.dtype, jnp.floating):
            raise KernelError(
                f"{operation}: kv is {kv.dtype}; use a floating dtype, or QuantizedPages for codes"
            )
        return
    scales, expected = kv.scales_LP1X, (*kv.shape[:2], 1, vectors * kv.shape[2])
    if not cache_has_codes(kv.dtype) or scales.shape != expected or scales.dtype != jnp.float32:
        raise KernelError(
            f"{operation}: codes{kv.shape} {kv.dtype} with scales{scales.shape} {scales.dtype} "
            f"must be int8 or float8_e4m3fn with float32 scales of shape {expected}"
        )


def _check_rows(inputs: PagedInputs) -> None:
    table = inputs.page_table_RW
    if table.ndim != 2 or 0 in table.shape:
        raise KernelError(f"paged_attention: page_table{table.shape} must be [rows, pages]")
    R = table.shape[0]
    if inputs.query_start_R1.shape != (R + 1,) or inputs.context_lens_R.shape != (R,):
        raise KernelError(
            f"paged_attention: query_start{inputs.query_start_R1.shape} and "
            f"context_lens{inputs.context_lens_R.shape} must be ({R + 1},) and ({R},) "
            f"for a page table of {R} rows"
        )
    for name in ("layer", "page_table_RW", "query_start_R1", "context_lens_R"):
        dtype = getattr(inputs, name).dtype
        if dtype != jnp.int32:
            raise KernelError(f"paged_attention: {name} is {dtype}; use int32")


def _check_options(inputs: PagedInputs) -> None:
    N = inputs.q_TNH.shape[1]
    if inputs.window is not None and inputs.window < 1:
        raise KernelError(
            f"paged_attention: window={inputs.window} sees nothing; use 1 or more, or None"
        )
    if inputs.softcap is not None and not inputs.softcap > 0:
        raise KernelError(
            f"paged_attention: softcap={inputs.softcap} must be above 0; use None for none"
        )
    if inputs.sinks_N is not None and inputs.sinks_N.shape != (N,):
        raise KernelError(
            f"paged_attention: sinks{inputs.sinks_N.shape} must have one value per query head: "
            f"({N},)"
        )
