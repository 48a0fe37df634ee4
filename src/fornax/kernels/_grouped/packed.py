"""Grouped products with packed weights: codes of few bits, and a scale for a group of inputs.

What a weight was laid out for decides what runs. The native kernel reads the codes of a group that
has rows where they lie (`_native/packed_experts.cc`); in XLA a loop over blocks of rows widens one
group's matrix at a time, so that no float copy of all exists.

Legend: M rows, E groups, K inputs, N outputs, B rows of a block.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fornax.config.errors import KernelError
from fornax.kernels._grouped.blockwise import block_of, over_blocks
from fornax.kernels._grouped.call import GroupedInputs, free_devices
from fornax.kernels._grouped.reference import reference
from fornax.kernels._packed import PackedWeight, Precision, native, pack, plain
from fornax.kernels._packed.formats import FORMATS
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["PackedGroupedCall", "multiply_packed", "packed_grouped_matmul_operation"]


@dataclass(frozen=True)
class PackedGroupedCall:
    """Shapes and formats of one call: what implementations look at when they decline."""

    platform: str
    rows: int
    groups: int
    inputs: int
    outputs: int
    dtype: str
    """Of the rows."""
    precision: Precision
    group: int | None
    """Inputs that share a scale."""
    layout: str
    """What the weight was laid out for, `native` or `plain`."""
    devices: int
    """See `GroupedCall.devices`."""


@dataclass(frozen=True)
class _Inputs:
    x_MK: jax.Array
    weight: PackedWeight
    sizes_E: jax.Array

    @property
    def precision(self) -> Precision:
        precision = self.weight.precision
        assert precision != "blocks", "blocks hold no experts"
        return precision


def multiply_packed(
    x_MK: jax.Array, weight: PackedWeight, sizes_E: jax.Array, implementation: str | None
) -> jax.Array:
    """`grouped_matmul` by a packed weight; it has no gradient.

    Raises:
        KernelError: arguments that do not fit together.
    """
    if weight.experts is None or (weight.stacked and weight.layer is None):
        raise KernelError(
            f"grouped_matmul: the packed weight{weight.shape} must be one layer of matrices; pack "
            "with experts=True, and take a layer of a stack with at()"
        )
    N = math.prod(weight.outputs)
    if x_MK.ndim != 2 or (x_MK.shape[1],) != weight.inputs or weight.outputs != (N,):
        raise KernelError(
            f"grouped_matmul: x{x_MK.shape} and w{weight.shape} must be [M, K] and [E, K, N] with "
            "one K"
        )
    if sizes_E.shape != (weight.experts,) or sizes_E.dtype != jnp.int32:
        raise KernelError(
            f"grouped_matmul: group_sizes{sizes_E.shape} of {sizes_E.dtype} must be int32, one "
            f"for each of the {weight.experts} matrices of w"
        )
    if x_MK.dtype not in (jnp.float32, jnp.bfloat16):
        raise KernelError(
            f"grouped_matmul: x is {x_MK.dtype}; a packed weight takes float32 or bfloat16, so "
            "cast x"
        )
    inputs = _Inputs(x_MK, weight, sizes_E)
    call = PackedGroupedCall(
        platform=current_platform(),
        rows=x_MK.shape[0],
        groups=weight.experts,
        inputs=x_MK.shape[1],
        outputs=N,
        dtype=jnp.dtype(x_MK.dtype).name,
        precision=inputs.precision,
        group=weight.group,
        layout=weight.implementation,
        devices=free_devices(),
    )
    chosen = packed_grouped_matmul_operation.choose(call, implementation)
    if call.rows == 0:
        return jnp.zeros((0, N), x_MK.dtype)
    return chosen.run(inputs)


def _native(inputs: _Inputs) -> jax.Array:
    weight = inputs.weight
    return native.grouped(
        inputs.x_MK,
        weight.parts,
        inputs.sizes_E,
        weight.index,
        weight.outputs[0],
        inputs.precision,
    )


def _blockwise(inputs: _Inputs) -> jax.Array:
    x_MK, weight = inputs.x_MK, inputs.weight
    M, K = x_MK.shape
    block = block_of(M, inputs.sizes_E.shape[0])
    rounded_MK = x_MK.astype(FORMATS[inputs.precision].rows).astype(jnp.float32)
    padded_MK = jnp.pad(rounded_MK, ((0, block), (0, 0)))

    def visit(y_MN: jax.Array, group: jax.Array, first: jax.Array, counts_B1: jax.Array) -> Any:
        x_BK = jnp.where(counts_B1, lax.dynamic_slice_in_dim(padded_MK, first, block), 0)
        w_KN = plain.expert(weight.parts, weight.index, group, K, inputs.precision, weight.group)
        y_BN = jnp.matmul(x_BK, w_KN, precision=lax.Precision.HIGHEST)
        return lax.dynamic_update_slice_in_dim(y_MN, y_BN, first, 0)

    y_MN = jnp.zeros((M + block, weight.outputs[0]), jnp.float32)
    return over_blocks(inputs.sizes_E, block, y_MN, visit)[:M].astype(x_MK.dtype)


def _reference(inputs: _Inputs) -> jax.Array:
    """All matrices widened at once; x is not rounded."""
    w_EKN = dataclasses.replace(inputs.weight, dtype=jnp.dtype(jnp.float32)).unpack()
    wide_MK = inputs.x_MK.astype(jnp.float32)
    return reference(GroupedInputs(wide_MK, w_EKN, inputs.sizes_E)).astype(inputs.x_MK.dtype)


def _declines_native(call: PackedGroupedCall) -> str | None:
    if call.layout != "native":
        return "the weight is laid out for XLA"
    if call.devices > 1:
        return f"the mesh in use divides arrays over {call.devices} devices"
    return native.unavailable(experts=True)


def _declines_blockwise(call: PackedGroupedCall) -> str | None:
    return None if call.layout == "plain" else "the weight is laid out for the native kernel"


def _benchmark(
    call: PackedGroupedCall, run: Callable[[_Inputs], jax.Array]
) -> Callable[[], object]:
    """Return a function that computes the product with groups of equal sizes."""
    rng = np.random.default_rng(0)
    shape = (call.groups, call.inputs, call.outputs)
    weight = pack(
        jnp.asarray(rng.normal(size=shape), jnp.float32),
        precision=call.precision,
        group=call.group,
        experts=True,
        implementation="native" if call.layout == "native" else "plain",
    )
    x_MK = jnp.asarray(rng.normal(size=(call.rows, call.inputs)), call.dtype)
    ends = np.arange(call.groups + 1) * call.rows // call.groups
    sizes_E = jnp.asarray(np.diff(ends), jnp.int32)
    step = jax.jit(lambda x, weight, sizes: run(_Inputs(x, weight, sizes)))
    return lambda: step(x_MK, weight, sizes_E)


def _work(call: PackedGroupedCall) -> Work:
    """The product; rows, results and codes moved once."""
    M, K, N = call.rows, call.inputs, call.outputs
    form = FORMATS[call.precision]
    groups = -(-K // (call.group or K))
    shared = 1 if call.precision == "mxfp4" else 5 if call.precision == "int4" else 4
    weights = call.groups * N * (K * form.bits / 8 + groups * shared)
    moved = np.dtype(call.dtype).itemsize * M * (K + N) + weights
    return Work(flops=2.0 * M * K * N, bytes=float(moved), dtype=call.dtype)


packed_grouped_matmul_operation: Operation[PackedGroupedCall] = register(
    Operation(
        "packed_grouped_matmul",
        (
            Implementation("native", _native, _declines_native, platform="cpu", steady=True),
            Implementation("blockwise", _blockwise, _declines_blockwise),
            Implementation("reference", _reference, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=PackedGroupedCall,
    )
)
