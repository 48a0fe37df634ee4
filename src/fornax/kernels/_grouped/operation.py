"""The grouped product: its one signature, its implementations in order, its derivative.

Legend: M rows, E groups, K inputs, N outputs.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fornax.kernels._grouped import hopper, native, ragged, tpu
from fornax.kernels._grouped.blockwise import blockwise
from fornax.kernels._grouped.call import GroupedCall, GroupedInputs, GroupedProducts, describe
from fornax.kernels._grouped.packed import multiply_packed
from fornax.kernels._grouped.reference import reference
from fornax.kernels._grouped.weight import GroupedWeight
from fornax.kernels._linear import LINEAR_OUTPUT
from fornax.kernels._packed import PackedWeight
from fornax.kernels.registry import Implementation, Operation, Work, register

__all__ = ["grouped_matmul", "grouped_matmul_operation"]


def grouped_matmul(
    x_MK: jax.Array,
    w_EKN: jax.Array | GroupedWeight | PackedWeight,
    group_sizes_E: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group of consecutive rows by the matrix of its group.

    Rows [sum(sizes[:e]), sum(sizes[:e + 1])) are multiplied by w[e]. It computes for one device:
    under a mesh call it inside `shard_map`, with `check_vma=False`; outside it XLA divides a slower
    implementation.

    Args:
        x_MK: rows sorted by group; one floating dtype for x and w.
        w_EKN: a matrix for each group; of a `GroupedWeight`, which is only read, x may be float32
            whatever its dtype: it is rounded to it. Of a `PackedWeight` with experts x is float32
            or bfloat16, rounded as `pack` says; there is no gradient.
        group_sizes_E: int32 rows of each group, 0 or more, with a sum of at most M. Rows beyond it
            are padding: whatever they hold, they are zeros in y and get a gradient of zeros.
        implementation: name of one implementation to run, no other.

    Returns:
        y [M, N] in the dtype of x, summed in float32, under the checkpoint name `LINEAR_OUTPUT`.
        The gradient of a matrix whose group has no rows is zeros.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
    """
    if isinstance(w_EKN, PackedWeight):
        return multiply_packed(x_MK, w_EKN, group_sizes_E, implementation)
    inputs = GroupedInputs(x_MK=x_MK, w_EKN=w_EKN, sizes_E=group_sizes_E)
    call = describe(inputs)
    chosen = grouped_matmul_operation.choose(call, implementation)
    if 0 in (call.rows, call.groups, call.inputs, call.outputs):
        return jnp.zeros((call.rows, call.outputs), x_MK.dtype)
    return checkpoint_name(chosen.run(inputs), LINEAR_OUTPUT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    products: GroupedProducts, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    return products.by_group(x_MK, w_EKN, sizes_E, False)


def _forward(
    products: GroupedProducts, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return products.by_group(x_MK, w_EKN, sizes_E, False), (x_MK, w_EKN, sizes_E)


def _backward(
    products: GroupedProducts, saved: tuple[jax.Array, ...], dy_MN: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """Of an argument that is not differentiated the product is dead code, which XLA removes."""
    x_MK, w_EKN, sizes_E = saved
    dx_MK = products.by_group(dy_MN, w_EKN, sizes_E, True)
    return dx_MK, products.outer(x_MK, dy_MN, sizes_E), None


_multiply.defvjp(_forward, _backward)


def _run(products: GroupedProducts) -> Callable[[GroupedInputs], jax.Array]:
    def run(inputs: GroupedInputs) -> jax.Array:
        assert not isinstance(inputs.w_EKN, GroupedWeight)
        return _multiply(products, inputs.x_MK, inputs.w_EKN, inputs.sizes_E)

    return run


def _native(inputs: GroupedInputs) -> jax.Array:
    if isinstance(inputs.w_EKN, GroupedWeight):
        return native.of_layer(inputs.x_MK, inputs.w_EKN, inputs.sizes_E)
    return _run(native.native)(inputs)


def _sliced(run: Callable[[GroupedInputs], jax.Array]) -> Callable[[GroupedInputs], jax.Array]:
    """`run`, which takes arrays alone, for a layer's matrices too."""

    def of_slice(inputs: GroupedInputs) -> jax.Array:
        x_MK, w = inputs.x_MK, inputs.w_EKN
        if not isinstance(w, GroupedWeight):
            return run(inputs)
        narrow = dataclasses.replace(inputs, x_MK=x_MK.astype(w.dtype), w_EKN=w.array())
        return run(narrow).astype(x_MK.dtype)

    return of_slice


def _benchmark(
    call: GroupedCall, run: Callable[[GroupedInputs], jax.Array]
) -> Callable[[], object]:
    """Return a function that computes the product and its gradients with groups of equal sizes."""
    rng = np.random.default_rng(0)
    x_MK = jnp.asarray(rng.normal(size=(call.rows, call.inputs)), call.dtype)
    w_EKN = jnp.asarray(rng.normal(size=(call.groups, call.inputs, call.outputs)), call.dtype)
    ends = np.arange(call.groups + 1) * call.rows // call.groups
    sizes_E = jnp.asarray(np.diff(ends), jnp.int32)

    def loss(x_MK: jax.Array, w_EKN: jax.Array) -> jax.Array:
        inputs = GroupedInputs(x_MK=x_MK, w_EKN=w_EKN, sizes_E=sizes_E)
        return jnp.sum(run(inputs).astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return lambda: step(x_MK, w_EKN)


def _work(call: GroupedCall) -> Work:
    """The product and its two gradients; rows, matrices and both gradients moved."""
    M, K, N = call.rows, call.inputs, call.outputs
    item = np.dtype(call.dtype).itemsize
    # Rows and matrices are read forward and backward, and so is the gradient of the result.
    moved = 3 * (M * K + call.groups * K * N) + 3 * M * N
    return Work(flops=6.0 * M * K * N, bytes=float(item * moved), dtype=call.dtype)


grouped_matmul_operation: Operation[GroupedCall] = register(
    Operation(
        "grouped_matmul",
        (
            Implementation("native", _native, native.declines, platform="cpu"),
            Implementation("megablox", _sliced(_run(tpu.megablox)), tpu.declines, platform="tpu"),
            Implementation(
                "tokamax", _sliced(_run(hopper.tokamax)), hopper.declines, platform="gpu"
            ),
            Implementation(
                "ragged_dot", _sliced(_run(ragged.ragged_dot)), ragged.declines, on=("gpu", "tpu")
            ),
            Implementation("blockwise", _sliced(_run(blockwise)), lambda call: None),
            Implementation("reference", _sliced(reference), lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=GroupedCall,
    )
)
