"""The short causal convolution of linear attention over a ragged batch, with its activation.

Each channel is mixed over the last W tokens of its sequence; what those of the next step need lies
in the slots that hold its state.

Legend: T tokens of the batch, U sequences, L layers, A slots, J slots that a sequence writes,
K heads, X channels of a head, W width of the convolution; of a stack it is W - 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer.gated import ACTIVATIONS, Activation
from fornax.kernels._layer.native import declines, is_open
from fornax.kernels._slots import SlotRows
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = [
    "RaggedConvolutionCall",
    "ragged_convolution",
    "ragged_convolution_operation",
    "weigh_taps",
]


@dataclass(frozen=True)
class RaggedConvolutionCall:
    """One call: what implementations look at when they decline."""

    platform: str
    tokens: int
    rows: int
    """Sequences."""
    kept: int
    """States that a sequence writes, at most."""
    channels: int
    width: int
    """Tokens that a channel sees, its own included."""
    dtype: str
    kept_dtype: str
    """Of what the slots hold."""
    bias: bool
    activation: Activation
    devices: int
    """Over which XLA divides what is computed here."""


def ragged_convolution(
    x_TKX: jax.Array,
    inputs_LAWKX: jax.Array,
    kernel_KXW: jax.Array,
    bias_KX: jax.Array | None,
    *,
    activation: Activation,
    layer: jax.Array,
    query_start_U1: jax.Array,
    slots_U: jax.Array,
    kept_UJ: jax.Array,
    fresh_U: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve sequences that stand one after the other; summed in float32, rounded once.

    y_t = activation(sum_w kernel_w x_(t - W + 1 + w) + bias), where a token before the sequence's
    first is 0. The native kernel gives a token the same bits whatever else is in the batch, and
    however its sequence is divided into calls.

    Args:
      x_TKX: the batch's channels, floating.
      inputs_LAWKX: the last W - 1 tokens' channels of all layers and slots, the oldest first.
      kernel_KXW: the weights, the oldest token's first.
      bias_KX: added to the sum; None for zeros.
      activation: `silu` or `gelu_tanh`.
      layer: int32, the layer whose slots are read and written.
      query_start_U1: as `ragged_gated_delta_rule` takes it, like all that follows.
      slots_U: int32.
      kept_UJ: int32.
      fresh_U: bool.
      implementation: name of one implementation to run, no other.

    Returns:
      y [T, K, X] in the dtype of x, which of padding means nothing, and the stack, changed in the
      kept slots of sequences with tokens alone.

    Raises:
      KernelError: shapes that do not go together, another activation, or `implementation` cannot
        run the call.
    """
    rows = SlotRows(query_start_U1, slots_U, kept_UJ, fresh_U, layer)
    T, K, X = x_TKX.shape
    W = kernel_KXW.shape[-1]
    wanted = {
        "kernel": (kernel_KXW, (K, X, W)),
        "bias": (bias_KX, (K, X)),
        "inputs": (inputs_LAWKX, (*inputs_LAWKX.shape[:2], W - 1, K, X)),
    }
    rows.check("ragged_convolution", f"x{x_TKX.shape} and kernel{kernel_KXW.shape}", wanted)
    if activation not in ACTIVATIONS:
        raise KernelError(
            f"ragged_convolution: activation={activation!r} is unknown; use one of: "
            f"{', '.join(ACTIVATIONS)}"
        )
    if is_open(x_TKX, inputs_LAWKX, kept_UJ):
        return _xla(x_TKX, inputs_LAWKX, kernel_KXW, bias_KX, activation, rows)
    call = RaggedConvolutionCall(
        platform=current_platform(),
        tokens=T,
        rows=kept_UJ.shape[0],
        kept=kept_UJ.shape[1],
        channels=K * X,
        width=W,
        dtype=jnp.dtype(x_TKX.dtype).name,
        kept_dtype=jnp.dtype(inputs_LAWKX.dtype).name,
        bias=bias_KX is not None,
        activation=activation,
        devices=free_devices(),
    )
    chosen = ragged_convolution_operation.choose(call, implementation)
    return chosen.run(x_TKX, inputs_LAWKX, kernel_KXW, bias_KX, activation, rows)


def weigh_taps(
    taps: tuple[jax.Array, ...],
    kernel_KXW: jax.Array,
    bias_KX: jax.Array | None,
    activation: Activation,
) -> jax.Array:
    """The convolution of what each place sees: W arrays [..., K, X], the oldest tokens' first."""
    kernel_KXW = kernel_KXW.astype(jnp.float32)
    y = jnp.zeros(taps[0].shape, jnp.float32)
    for place, there in enumerate(taps):
        y = y + there.astype(jnp.float32) * kernel_KXW[:, :, place]
    if bias_KX is not None:
        y = y + bias_KX.astype(jnp.float32)
    return ACTIVATIONS[activation](y).astype(taps[0].dtype)


def _native(
    x_TKX: jax.Array,
    inputs_LAWKX: jax.Array,
    kernel_KXW: jax.Array,
    bias_KX: jax.Array | None,
    activation: Activation,
    rows: SlotRows,
) -> tuple[jax.Array, jax.Array]:
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs_LAWKX, x_TKX))
    call = jax.ffi.ffi_call("fornax_ragged_convolution", results, input_output_aliases={0: 0})
    bias = jnp.zeros((0,)) if bias_KX is None else bias_KX.astype(jnp.float32)
    kernel_CW = kernel_KXW.astype(jnp.float32).reshape(-1, kernel_KXW.shape[-1])
    inputs_LAWKX, y_TKX = call(
        inputs_LAWKX,
        x_TKX,
        kernel_CW,
        bias,
        *(rows.layer, rows.starts_U1, rows.slots_U, rows.kept_UJ, rows.fresh_U),
        gelu=np.bool_(activation == "gelu_tanh"),
    )
    return y_TKX, inputs_LAWKX


def _xla(
    x_TKX: jax.Array,
    inputs_LAWKX: jax.Array,
    kernel_KXW: jax.Array,
    bias_KX: jax.Array | None,
    activation: Activation,
    rows: SlotRows,
) -> tuple[jax.Array, jax.Array]:
    # Read once: a second read beside the write would be of a copy of all slots.
    before_UWKX = rows.held(inputs_LAWKX)
    taps = _taps(x_TKX, before_UWKX, rows)
    y_TKX = weigh_taps(taps, kernel_KXW, bias_KX, activation)
    return y_TKX, _kept(x_TKX, before_UWKX, inputs_LAWKX, rows)


def _taps(x_TKX: jax.Array, before_UWKX: jax.Array, rows: SlotRows) -> tuple[jax.Array, ...]:
    """What each place of the convolution sees: W arrays [T, K, X], the oldest tokens' first."""
    T = len(x_TKX)
    token_T = jnp.arange(T, dtype=jnp.int32)
    ends_U = rows.starts_U1[1:]
    row_T = jnp.searchsorted(ends_U, token_T, side="right", method="compare_all")
    row_T = jnp.minimum(row_T, len(ends_U) - 1)
    offset_T, kept = token_T - rows.starts_U1[row_T], before_UWKX.shape[1]
    found = []
    for back in range(kept, 0, -1):
        own_TKX = jnp.pad(x_TKX, ((back, 0), (0, 0), (0, 0)))[:T]
        place_T = jnp.minimum(offset_T + kept - back, kept - 1)
        before_TKX = before_UWKX[row_T, place_T].astype(x_TKX.dtype)
        found.append(jnp.where((offset_T >= back)[:, None, None], own_TKX, before_TKX))
    return (*found, x_TKX)


def _kept(
    x_TKX: jax.Array, before_UWKX: jax.Array, inputs_LAWKX: jax.Array, rows: SlotRows
) -> jax.Array:
    """The stack with the last tokens' channels in the slots that take them."""
    counts_U1 = rows.counts[:, None]
    place_J = jnp.arange(rows.kept_UJ.shape[1])
    seen_UJ = jnp.where(counts_U1 > len(place_J), counts_U1, place_J + 1)
    slots_UJ = jnp.where(counts_U1 > place_J, rows.kept_UJ, inputs_LAWKX.shape[1])
    size = before_UWKX.shape[1]
    place_UJW = seen_UJ[..., None] + jnp.arange(size)
    there_UJW = jnp.minimum(place_UJW, size - 1)
    own_UJW = rows.starts_U1[:-1, None, None] + place_UJW - size
    own_UJW = jnp.clip(own_UJW, 0, len(x_TKX) - 1)
    last_UJWKX = jnp.where(
        (place_UJW >= size)[..., None, None],
        x_TKX[own_UJW].astype(inputs_LAWKX.dtype),
        jnp.take_along_axis(before_UWKX[:, None], there_UJW[..., None, None], axis=2),
    )
    return inputs_LAWKX.at[rows.layer, slots_UJ].set(last_UJWKX, mode="drop")


def _declines(call: RaggedConvolutionCall) -> str | None:
    if call.dtype != call.kept_dtype:
        return f"x is {call.dtype}, and slots hold {call.kept_dtype}"
    return declines(call.devices, call.dtype, unit="linear_attention")


def _benchmark(
    call: RaggedConvolutionCall, run: Callable[..., tuple[jax.Array, jax.Array]]
) -> Callable[[], object]:
    C, W, rows = call.channels, call.width, SlotRows.even(call.tokens, call.rows, call.kept)
    keys = jax.random.split(jax.random.key(0), 3)
    x_TKX = jax.random.normal(keys[0], (call.tokens, 1, C), call.dtype)
    kernel_KXW = jax.random.normal(keys[1], (1, C, W))
    bias_KX = jnp.ones((1, C)) if call.bias else None
    shape = (2, call.rows * call.kept, W - 1, 1, C)
    held = [jax.random.normal(keys[2], shape, call.kept_dtype)]
    work = jax.jit(run, static_argnums=4, donate_argnums=1)

    def step() -> tuple[jax.Array, jax.Array]:
        y_TKX, held[0] = work(x_TKX, held[0], kernel_KXW, bias_KX, call.activation, rows)
        return y_TKX, held[0]

    return step


def _work(call: RaggedConvolutionCall) -> Work:
    """The channels read and written once, and what each sequence's slots hold."""
    size, kept_size = (jnp.dtype(dtype).itemsize for dtype in (call.dtype, call.kept_dtype))
    held = 2 * min(call.rows, call.tokens) * (call.width - 1) * kept_size
    moved = call.channels * (2 * call.tokens * size + held + 4 * (call.width + call.bias))
    return Work(flops=0.0, bytes=float(moved), dtype=call.dtype)


ragged_convolution_operation: Operation[RaggedConvolutionCall] = register(
    Operation(
        "ragged_convolution",
        (
            Implementation("native", _native, _declines, platform="cpu", steady=True),
            Implementation("xla", _xla, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=RaggedConvolutionCall,
    )
)
