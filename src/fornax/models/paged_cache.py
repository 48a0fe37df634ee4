"""The paged key/value cache: pages of a few tokens each, in one array for each attention window.

Legend: T tokens of the step, R sequences of the step, W pages of a table, L layers of a group,
P pages, S slots of a page, C key and value heads in turn (C = 2 K; of latents, and of keys beside
their values, C = K), N query heads, H head width.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.attend import AttendOptions, Place
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.state_slots import StateSlots

__all__ = [
    "CacheHeads",
    "PageTables",
    "PagedCache",
    "cache_layers",
    "cache_windows",
    "describe_pages",
    "init_pages",
    "page_bytes",
]


def cache_windows(config: DecoderConfig) -> tuple[int | None, ...]:
    """The distinct windows of the layers that keep keys and values, one page group for each, in
    order of depth."""
    return tuple(dict.fromkeys(kind.window for kind in _paged_kinds(config)))


def cache_layers(config: DecoderConfig) -> tuple[int, ...]:
    """How many layers each group of `cache_windows` has."""
    windows = [kind.window for kind in _paged_kinds(config)]
    return tuple(windows.count(window) for window in cache_windows(config))


def _paged_kinds(config: DecoderConfig) -> list[LayerKind]:
    """Of the layers that keep keys and values; the others keep a state, or take another's. Last
    comes the layer of the first MTP module, the one that drafts."""
    kinds = config.layer_kinds() + (config.mtp_kind,) * min(config.num_mtp_modules, 1)
    return [kind for kind in kinds if not kind.linear and kind.keys != "shared"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("page_table_RW", "slots_T", "prepared", "chunks"),
    meta_fields=(),
)
@dataclass(frozen=True)
class PageTables:
    """Where the sequences of a step lie in one group's pages."""

    page_table_RW: jax.Array
    """int32: the page of each W-th run of S tokens; 0 where there is none."""
    slots_T: jax.Array
    """int32: page * S + slot that each token of the step is written to; in page 0 for padding."""
    prepared: kernels.PreparedAttention | None = None
    """What attention of all layers of the group shares; see `PagedCache.prepare`."""
    chunks: "ChunkRows | None" = None
    """The rows as chunked layers see them; made by `PagedCache.prepare`."""


class ChunkRows(NamedTuple):
    """A step's sequences cut at the borders of chunks: each piece sees its own chunk's keys only,
    and so is a sequence of its own to attention. V pieces; as many as there can be."""

    page_table_VX: jax.Array
    """int32: the pages of the piece's chunk."""
    query_start_V1: jax.Array
    """int32 [V + 1]: first token of each piece in the step."""
    context_lens_V: jax.Array
    """int32: tokens of the piece's chunk, the piece's own included; 0 where there is no piece."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("kv", "tables", "query_start_R1", "context_lens_R", "states"),
    meta_fields=("windows", "heads"),
)
@dataclass(frozen=True)
class PagedCache:
    """All pages of all groups, with where a step's tokens lie in them."""

    kv: tuple[kernels.Pages, ...]
    """One kv_LPSCH for each group."""
    tables: tuple[PageTables, ...]
    """One for each group."""
    query_start_R1: jax.Array
    """int32 [R + 1]: first token of each sequence in the step; padding comes after the last."""
    context_lens_R: jax.Array
    """int32: tokens of each sequence, the step's own included; 0 for rows without a sequence."""
    windows: tuple[int | None, ...]
    """The groups' windows."""
    heads: "tuple[CacheHeads, ...]"
    """The heads of each group, as its pages hold them."""
    states: StateSlots | None = None
    """Of linear layers; None where there are none."""

    def prepare(self, config: DecoderConfig, tokens: int, dtype: DTypeLike) -> "PagedCache":
        """Derive once what attention in every layer would derive from the tables.

        Args:
          config: the model's.
          tokens: T.
          dtype: of the queries.
        """
        chunked = {kind.window for kind in config.layer_kinds() if kind.chunked}
        ready: list[PageTables] = []
        groups = zip(self.kv, self.tables, self.windows, self.heads, strict=True)
        for kv, tables, window, own in groups:
            if window is not None and window in chunked:
                tables = replace(tables, chunks=self._chunks(tables, tokens, kv.shape[2], window))
            table_RW, start_R1, context_R = self._rows(tables)
            prepared = kernels.prepare_paged_attention(
                jax.ShapeDtypeStruct((tokens, config.num_heads, own.width), dtype),
                kv,
                page_table_RW=table_RW,
                query_start_R1=start_R1,
                context_lens_R=context_R,
                window=window,
                softcap=config.attention_logit_softcap,
                sinks=config.attention_sinks,
                shared=own.parts == 1,
            )
            ready.append(replace(tables, prepared=prepared))
        return replace(self, tables=tuple(ready))

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array | None,
        v_BTKH: jax.Array | None,
        place: Place,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, "PagedCache"]:
        """Write one layer's keys and values to their slots and attend through the page tables.

        The batch axis has size 1: the step's sequences stand one after the other on T. Heads are
        repeated and filled up with zeros to what the pages hold.
        """
        group = self.windows.index(options.window)
        tables, kv, own = self.tables[group], self.kv[group], self.heads[group]
        table_RW, start_R1, context_R = self._rows(tables)
        q_TNH = _fit(q_BTNH[0], own.width)
        rows: dict[str, Any] = {
            "layer": place.among,
            "page_table_RW": table_RW,
            "query_start_R1": start_R1,
            "context_lens_R": context_R,
            "scale": options.scale,
            "window": options.window,
            "softcap": options.softcap,
            "sinks_N": sinks_N,
            "prepared": tables.prepared,
        }
        if k_BTKH is None:
            o_TNH = kernels.paged_attention(q_TNH, kv, shared=own.parts == 1, **rows)
        else:
            repeats = own.count // k_BTKH.shape[2]
            k_TKH = _fit(k_BTKH[0], own.width, repeats)
            v_TKH = None if v_BTKH is None else _fit(v_BTKH[0], own.width, repeats)
            o_TNH, kv = kernels.paged_attention_update(
                q_TNH, k_TKH, v_TKH, kv, slots_T=tables.slots_T, **rows
            )
        everything = (*self.kv[:group], kv, *self.kv[group + 1 :])
        return o_TNH[None, ..., : q_BTNH.shape[3]], replace(self, kv=everything)

    def _rows(self, tables: PageTables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A group's rows to attention: page table, query starts and context lengths."""
        if tables.chunks is not None:
            return tuple(tables.chunks)
        return tables.page_table_RW, self.query_start_R1, self.context_lens_R

    def _chunks(self, tables: PageTables, tokens: int, page_size: int, length: int) -> ChunkRows:
        """Cut the step's sequences at multiples of `length`, a multiple of the page size."""
        (R, W), pages = tables.page_table_RW.shape, length // page_size
        # A sequence's first token begins a piece, and of its others one in `length`.
        most = R + min(R, tokens // 2) + tokens // length
        token_T = jnp.arange(tokens, dtype=jnp.int32)
        row_T = jnp.searchsorted(
            self.query_start_R1[1:], token_T, side="right", method="compare_all"
        )
        row_T = jnp.minimum(row_T, R - 1).astype(jnp.int32)
        position_T = self.context_lens_R[row_T] - (self.query_start_R1[row_T + 1] - token_T)
        end = self.query_start_R1[-1]
        begins_T = (token_T == self.query_start_R1[row_T]) | (position_T % length == 0)
        [start_V1] = jnp.nonzero(begins_T & (token_T < end), size=most + 1, fill_value=tokens)
        start_V1 = jnp.minimum(start_V1.astype(jnp.int32), end)
        count_V = start_V1[1:] - start_V1[:-1]
        first_V = jnp.minimum(start_V1[:-1], tokens - 1)
        chunk_V, inside_V = position_T[first_V] // length, position_T[first_V] % length
        at_VX = jnp.minimum(chunk_V[:, None] * pages + jnp.arange(min(pages, W)), W - 1)
        return ChunkRows(
            tables.page_table_RW[row_T[first_V][:, None], at_VX],
            start_V1,
            jnp.where(count_V > 0, inside_V + count_V, 0),
        )


def _fit(x_TKH: jax.Array, width: int, repeats: int = 1) -> jax.Array:
    missing = width - x_TKH.shape[2]
    if missing:
        x_TKH = jnp.pad(x_TKH, ((0, 0), (0, 0), (0, missing)))
    return jnp.repeat(x_TKH, repeats, axis=1) if repeats > 1 else x_TKH


class CacheHeads(NamedTuple):
    """The key/value heads of pages."""

    count: int
    """A multiple of the model's: each head is kept that many times, side by side."""
    width: int
    """The model's, or more: what is more is zero."""
    parts: int = 2
    """Vectors of a head: its key and its value, or one that is both."""
    joined: bool = False
    """Whether a value is beside its key, in a row of twice the width."""

    def token_bytes(self, dtype: DTypeLike) -> int:
        """Bytes that a layer's pages of `dtype` hold of a token, scales of codes included."""
        return self.parts * self.count * kernels.cache_vector_bytes(self.width, dtype)

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows the pages hold of a token, and how wide."""
        if self.joined:
            return self.count, self.parts * self.width
        return self.parts * self.count, self.width

    @staticmethod
    def of(config: DecoderConfig) -> "tuple[CacheHeads, ...]":
        """The model's own for each group of `cache_windows`: latent attention keeps one latent per
        token."""
        windows = cache_windows(config)
        if config.latent is not None:
            return (CacheHeads(1, config.latent.cached_dim, parts=1),) * len(windows)
        shapes = {kind.window: config.kv_shape(kind) for kind in _paged_kinds(config)}
        return tuple(CacheHeads(*shapes[window]) for window in windows)


def describe_pages(
    config: DecoderConfig,
    num_pages: Sequence[int],
    page_size: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = ("tensor",),
    heads: Sequence[CacheHeads] | None = None,
) -> tuple[kernels.Pages, ...]:
    """The pages kv_LPSCH of each group of `cache_windows`, as shapes with how they are divided over
    a mesh.

    Args:
      config: the model's.
      num_pages: P of each group; page 0 of each takes what padding writes.
      page_size: S.
      dtype: of keys and values; int8 and float8_e4m3fn make `kernels.QuantizedPages`.
      mesh: where they will lie; key/value heads are divided over `axes` where they divide.
      axes: mesh axes for the heads.
      heads: of each group, as the pages hold them; None for the model's own.
    """
    heads = heads or CacheHeads.of(config)

    def describe(layers: int, pages: int, own: CacheHeads) -> kernels.Pages:
        shape = (layers, pages, page_size, *own.rows)
        vectors = own.parts * own.count
        described = jax.eval_shape(lambda: kernels.empty_pages(shape, vectors, dtype))
        if mesh is None:
            return described
        shards = math.prod(mesh.shape[axis] for axis in axes)
        divided = axes if own.count % shards == 0 else None

        def put(one: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(put, described, kernels.page_specs(described, divided))

    groups = zip(cache_layers(config), num_pages, heads, strict=True)
    return tuple(describe(*group) for group in groups)


def init_pages(
    config: DecoderConfig,
    num_pages: Sequence[int],
    page_size: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = ("tensor",),
    heads: Sequence[CacheHeads] | None = None,
) -> tuple[kernels.Pages, ...]:
    """Empty pages, as `describe_pages` says."""

    def make(pages: jax.Array) -> jax.Array:
        if pages.sharding is None:
            return jnp.zeros(pages.shape, pages.dtype)
        zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=pages.sharding)
        return zeros(pages.shape, pages.dtype)

    described = describe_pages(config, num_pages, page_size, dtype, mesh, axes, heads)
    return jax.tree.map(make, described)


def page_bytes(
    config: DecoderConfig,
    page_size: int,
    dtype: DTypeLike,
    heads: Sequence[CacheHeads] | None = None,
) -> tuple[int, ...]:
    """Bytes of one page of each group, over all its layers and heads."""
    heads = heads or CacheHeads.of(config)
    groups = zip(cache_layers(config), heads, strict=True)
    return tuple(page_size * own.token_bytes(dtype) * layers for layers, own in groups)
