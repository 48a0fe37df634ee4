"""From logits to a token: what the filters keep of each row, and the draw among that.

Legend: M rows, V vocabulary, G x L the vocabulary in lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from fornax.config.errors import KernelError
from fornax.kernels import reductions
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer import native, top_k_top_p
from fornax.kernels._layer.greedy import argmax_in_lanes
from fornax.kernels._layer.top_k_top_p import TokenFilters
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = [
    "FilterLogitsCall",
    "SampleTokensCall",
    "TokenFilters",
    "filter_logits",
    "filter_logits_operation",
    "sample_tokens",
    "sample_tokens_operation",
]


@dataclass(frozen=True)
class SampleTokensCall:
    """One call: what implementations look at when they decline."""

    platform: str
    rows: int
    width: int
    devices: int
    """Over which XLA divides what is computed here."""


@dataclass(frozen=True)
class FilterLogitsCall(SampleTokensCall):
    """One call of `filter_logits`."""


def filter_logits(
    logits_MV: jax.Array, filters: TokenFilters, *, implementation: str | None = None
) -> jax.Array:
    """Return the logits, -inf for the tokens that the filters leave out.

    A row's result is the same, bit for bit, whatever other rows there are. Rows of temperature 0
    stay as they are; one without a finite maximum gets none by this.

    Args:
        logits_MV: float32; -inf for forbidden tokens.
        filters: of each row.
        implementation: name of one implementation to run, no other.

    Returns:
        float32 [M, V].

    Raises:
        KernelError: other axes or dtypes, or `implementation` cannot run the call.
    """
    _check("filter_logits", logits_MV, filters)
    if native.is_open(logits_MV):
        return _filtered(logits_MV, filters)
    call = FilterLogitsCall(current_platform(), *logits_MV.shape, devices=free_devices())
    return filter_logits_operation.choose(call, implementation).run(logits_MV, filters)


def sample_tokens(
    logits_MV: jax.Array,
    uniforms_M2: jax.Array,
    filters: TokenFilters,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Draw a token for each row, among those that `filter_logits` keeps.

    First a lane of 256, by the lanes' sums, then a token of it. A row's token is the same whatever
    other rows there are, and the same as without filters from what `filter_logits` returns.

    Args:
        logits_MV: float32; -inf for forbidden tokens.
        uniforms_M2: float32 in [0, 1), independent of each other.
        filters: of each row.
        implementation: name of one implementation to run, no other.

    Returns:
        int32 [M]; the likeliest token in rows of temperature 0; -1 where the maximum of the logits
        is not finite.

    Raises:
        KernelError: other axes or dtypes, or `implementation` cannot run the call.
    """
    _check("sample_tokens", logits_MV, filters)
    if (uniforms_M2.shape, uniforms_M2.dtype) != ((logits_MV.shape[0], 2), jnp.float32):
        raise KernelError(
            f"sample_tokens: uniforms{uniforms_M2.shape} of {uniforms_M2.dtype} must be float32 "
            f"[M, 2] for logits{logits_MV.shape}"
        )
    if native.is_open(logits_MV):
        return _drawn(logits_MV, uniforms_M2, filters)
    call = SampleTokensCall(current_platform(), *logits_MV.shape, devices=free_devices())
    chosen = sample_tokens_operation.choose(call, implementation)
    return chosen.run(logits_MV, uniforms_M2, filters)


def _check(name: str, logits_MV: jax.Array, filters: TokenFilters) -> None:
    if logits_MV.ndim != 2 or logits_MV.dtype != jnp.float32:
        raise KernelError(
            f"{name}: logits{logits_MV.shape} of {logits_MV.dtype} must be float32 [M, V]"
        )
    for field, x_M in zip(filters._fields, filters, strict=True):
        wanted = jnp.int32 if field == "top_k_M" else jnp.float32
        if (x_M.shape, x_M.dtype) != (logits_MV.shape[:1], wanted):
            raise KernelError(
                f"{name}: {field}{x_M.shape} of {x_M.dtype} must be {jnp.dtype(wanted).name} [M] "
                f"for logits{logits_MV.shape}"
            )


def _filtered(logits_MV: jax.Array, filters: TokenFilters) -> jax.Array:
    samples, vocab_size = logits_MV.shape
    random_M = filters.temperature_M > 0
    cutting_M = (filters.top_k_M < vocab_size) | (filters.top_p_M < 1) | (filters.min_p_M > 0)

    def cut() -> jax.Array:
        depth_MGL = _depth(logits_MV, filters)
        kept_MGL = top_k_top_p.filtered(depth_MGL, jnp.exp(-depth_MGL), filters) > 0
        kept_MV = kept_MGL.reshape(samples, -1)[:, :vocab_size]
        return jnp.where(kept_MV | ~(random_M & cutting_M)[:, None], logits_MV, -jnp.inf)

    return lax.cond(jnp.any(cutting_M & random_M), cut, lambda: logits_MV)


def _drawn(logits_MV: jax.Array, uniforms_M2: jax.Array, filters: TokenFilters) -> jax.Array:
    greedy_M, random_M = argmax_in_lanes(logits_MV), filters.temperature_M > 0

    def draw() -> jax.Array:
        weights_MGL = jnp.exp(-_depth(_filtered(logits_MV, filters), filters))
        return reductions.pick(weights_MGL, uniforms_M2)

    drawn_M = lax.cond(jnp.any(random_M), draw, lambda: greedy_M)
    return jnp.where(random_M & (greedy_M >= 0), drawn_M, greedy_M)


def _depth(logits_MV: jax.Array, filters: TokenFilters) -> jax.Array:
    """How far a logit lies below the row's highest one, over the temperature; [M, G, L]."""
    x_MGL = reductions.split(logits_MV, -jnp.inf)
    scale_M = jnp.where(filters.temperature_M > 0, filters.temperature_M, 1.0)
    return (reductions.maximum(x_MGL)[:, None, None] - x_MGL) / scale_M[:, None, None]


def _native_filter(logits_MV: jax.Array, filters: TokenFilters) -> jax.Array:
    y = jax.ShapeDtypeStruct(logits_MV.shape, jnp.float32)
    call = jax.ffi.ffi_call("fornax_filter_logits", y, vmap_method="sequential")
    return call(logits_MV, *filters)


def _native_draw(logits_MV: jax.Array, uniforms_M2: jax.Array, filters: TokenFilters) -> jax.Array:
    tokens = jax.ShapeDtypeStruct(logits_MV.shape[:1], jnp.int32)
    call = jax.ffi.ffi_call("fornax_sample_tokens", tokens, vmap_method="sequential")
    return call(logits_MV, uniforms_M2, *filters)


def _made_up(call: SampleTokensCall) -> tuple[jax.Array, jax.Array, TokenFilters]:
    logits_MV = 3 * jax.random.normal(jax.random.key(0), (call.rows, call.width))
    uniforms_M2 = jax.random.uniform(jax.random.key(1), (call.rows, 2))
    numbers = jnp.float32(1.0), jnp.int32(50), jnp.float32(0.95), jnp.float32(0.0)
    filters = TokenFilters(*(jnp.broadcast_to(one, call.rows) for one in numbers))
    return logits_MV, uniforms_M2, filters


def _benchmark_filter(
    call: FilterLogitsCall, run: Callable[..., jax.Array]
) -> Callable[[], object]:
    logits_MV, _, filters = _made_up(call)
    work = jax.jit(run)
    return lambda: work(logits_MV, filters)


def _benchmark_draw(call: SampleTokensCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    made_up = _made_up(call)
    work = jax.jit(run)
    return lambda: work(*made_up)


def _declines(call: SampleTokensCall) -> str | None:
    return native.declines(call.devices, unit="sampling")


filter_logits_operation: Operation[FilterLogitsCall] = register(
    Operation(
        "filter_logits",
        (
            Implementation("native", _native_filter, _declines, platform="cpu", steady=True),
            Implementation("xla", _filtered, lambda call: None),
        ),
        _benchmark_filter,
        work=lambda call: Work(0.0, 8.0 * call.rows * call.width, "float32"),
        call=FilterLogitsCall,
    )
)

sample_tokens_operation: Operation[SampleTokensCall] = register(
    Operation(
        "sample_tokens",
        (
            Implementation("native", _native_draw, _declines, platform="cpu", steady=True),
            Implementation("xla", _drawn, lambda call: None),
        ),
        _benchmark_draw,
        work=lambda call: Work(0.0, 4.0 * call.rows * call.width, "float32"),
        call=SampleTokensCall,
    )
)
