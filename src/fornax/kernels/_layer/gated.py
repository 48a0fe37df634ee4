"""The gated linear unit: activation(gate) * up (Shazeer 2020).

Legend: M rows, F width of the MLP.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer import native
from fornax.kernels._tangent import native_tangent
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "GatedUnitCall",
    "gated_linear_unit",
    "gated_linear_unit_operation",
]

Activation = Literal["silu", "gelu_tanh"]


def gelu_tanh(x: jax.Array) -> jax.Array:
    """The GELU's approximation by tanh (Hendrycks and Gimpel 2016), elementwise.

    As x sigmoid(2 u) for x (1 + tanh(u)) / 2: where tanh is nearly -1, its sum with 1 has no right
    digit, and a norm that follows makes those as large as all others.
    """
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": gelu_tanh,
}
"""The activation of an MLP's gate, by its name."""


@dataclass(frozen=True)
class GatedUnitCall:
    """One call: what implementations look at when they decline."""

    platform: str
    rows: int
    width: int
    dtype: str
    activation: Activation
    devices: int
    """Over which XLA divides what is computed here."""


def gated_linear_unit(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: Activation,
    implementation: str | None = None,
) -> jax.Array:
    """Return activation(gate) * up, elementwise.

    On one CPU an element's result has the same bits whatever other rows there are; the gradients of
    gate and up are a native call there too.

    Args:
        gate: [..., F], floating.
        up: of the shape and dtype of gate.
        activation: silu, or gelu_tanh (`ACTIVATIONS`).
        implementation: name of one implementation to run, no other.

    Returns:
        y [..., F] in the dtype of gate.

    Raises:
        KernelError: gate and up differ, an unknown activation, or `implementation` cannot run the
            call.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype) or gate.ndim == 0:
        raise KernelError(
            f"gated_linear_unit: gate{gate.shape} {gate.dtype} and up{up.shape} {up.dtype} must be "
            "alike, of one axis at least"
        )
    if activation not in ACTIVATIONS:
        raise KernelError(
            f"activation={activation!r} is unknown; use one of: {', '.join(ACTIVATIONS)}"
        )
    return _gated(activation, implementation, gate, up)


def _choose(
    gate: jax.Array, activation: Activation, implementation: str | None
) -> Implementation[GatedUnitCall]:
    call = GatedUnitCall(
        platform=current_platform(),
        rows=math.prod(gate.shape[:-1]),
        width=gate.shape[-1],
        dtype=jnp.dtype(gate.dtype).name,
        activation=activation,
        devices=free_devices(),
    )
    return gated_linear_unit_operation.choose(call, implementation)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gated(
    activation: Activation, implementation: str | None, gate: jax.Array, up: jax.Array
) -> jax.Array:
    if native.is_open(gate):
        return _formula(gate, up, activation)
    return _choose(gate, activation, implementation).run(gate, up, activation)


@_gated.defjvp
def _gated_jvp(
    activation: Activation, implementation: str | None, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    gate, up = primals
    if native.is_open(gate) or _choose(gate, activation, implementation).name != "native":
        return jax.jvp(functools.partial(_formula, activation=activation), primals, tangents)
    y = _gated(activation, implementation, gate, up)
    return y, _tangent(*tangents, gate, up, how=activation)


def _formula(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    return ACTIVATIONS[activation](gate) * up


def _native(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """In float32, rounded once."""
    gate_MF = gate.reshape(-1, gate.shape[-1])
    y = jax.ShapeDtypeStruct(gate_MF.shape, gate.dtype)
    call = jax.ffi.ffi_call("fornax_gated_linear_unit", y, vmap_method="sequential")
    y_MF = call(gate_MF, up.reshape(gate_MF.shape), gelu=np.bool_(activation == "gelu_tanh"))
    return y_MF.reshape(gate.shape)


def _native_gradients(
    activation: Activation, dy: jax.Array, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate_MF = gate.reshape(-1, gate.shape[-1])
    like = jax.ShapeDtypeStruct(gate_MF.shape, gate.dtype)
    target = "fornax_gated_linear_unit_gradient"
    call = jax.ffi.ffi_call(target, (like, like), vmap_method="sequential")
    rows = [array.reshape(gate_MF.shape) for array in (dy, gate, up)]
    dgate_MF, dup_MF = call(*rows, gelu=np.bool_(activation == "gelu_tanh"))
    return dgate_MF.reshape(gate.shape), dup_MF.reshape(gate.shape)


_tangent = native_tangent(
    "gated_linear_unit_tangent",
    lambda activation, gate, up: _formula(gate, up, activation),
    _native_gradients,
)


def _benchmark(call: GatedUnitCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    gate, up = jax.random.normal(jax.random.key(0), (2, call.rows, call.width), call.dtype)
    work = jax.jit(functools.partial(run, activation=call.activation))
    return lambda: work(gate, up)


def _work(call: GatedUnitCall) -> Work:
    numbers = call.rows * call.width
    moved = 3.0 * numbers * jnp.dtype(call.dtype).itemsize
    return Work(flops=0.0, bytes=moved, dtype=call.dtype)


gated_linear_unit_operation: Operation[GatedUnitCall] = register(
    Operation(
        "gated_linear_unit",
        (
            Implementation(
                "native",
                _native,
                lambda call: native.declines(call.devices, call.dtype),
                platform="cpu",
                steady=True,
            ),
            Implementation("xla", _formula, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=GatedUnitCall,
    )
)
