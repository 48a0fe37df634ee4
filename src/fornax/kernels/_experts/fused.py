"""The experts of tokens in one native call, for inference on one CPU.

Token by token a layer of experts is thirty small operations around three products, and its threads
meet after each. Here they meet twice: gate, up and activation are one loop, down is the other, and
the matrices of the second are on their way while the first ends.

Legend: M tokens, D width, F width of an expert, E experts, k experts of a token, A = M k.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._experts import native
from fornax.kernels._grouped import GroupedWeight
from fornax.kernels._packed import PackedWeight
from fornax.kernels._packed import native as packed

__all__ = ["fused_experts", "fuses_experts"]


def fuses_experts(x: jax.Array, gate: object, up: object, down: object) -> bool:
    """Whether `fused_experts` can run tokens x [..., D] through these weights here."""
    weights = (gate, up, down)
    if x.dtype != jnp.float32 or not native.takes(x):
        return False
    if isinstance(gate, PackedWeight) and isinstance(up, PackedWeight):
        packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
        kinds = {(weight.implementation, weight.precision) for weight in packed}
        alike = kinds == {("native", gate.precision)} and gate.group == up.group
        return len(packed) == len(weights) and alike
    dtypes = {weight.dtype for weight in weights if isinstance(weight, GroupedWeight)}
    return all(isinstance(weight, GroupedWeight) for weight in weights) and dtypes in (
        {jnp.dtype(jnp.float32)},
        {jnp.dtype(jnp.bfloat16)},
    )


def fused_experts(
    x_MD: jax.Array,
    weights_Mk: jax.Array,
    experts_Mk: jax.Array,
    gate: GroupedWeight | PackedWeight,
    up: GroupedWeight | PackedWeight,
    down: GroupedWeight | PackedWeight,
    *,
    activation: Literal["silu", "gelu_tanh"],
    clip: float | None = None,
    gain: float = 1.702,
    gate_bias_EF: jax.Array | None = None,
    up_bias_EF: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    weigh_input: bool = False,
) -> jax.Array:
    """Sum each token's experts, weighted: w_k down_k(activation(gate_k x) * up_k x).

    A token's result has the same bits whatever other tokens there are and however many threads run.
    It has no gradient. Sums are float32; rows and activations are rounded to the matrices' dtype
    before they are multiplied, as `grouped_matmul` does; for packed weights as `pack` says.

    Args:
        x_MD: float32.
        weights_Mk: float32.
        experts_Mk: int32, all of a token different; E and above for none.
        gate: one layer [E, D, F], float32 or bfloat16, or all three packed in one precision, gate
            and up with groups of one size.
        up: one layer [E, D, F].
        down: one layer [E, F, D].
        activation: of gate's product.
        clip: c of (up + 1) gate sigmoid(gain * gate) with gate at most c and up within -c and c
            (gpt-oss), in the activation's place.
        gain: see `clip`.
        gate_bias_EF: added to the products.
        up_bias_EF: see `gate_bias_EF`.
        down_bias_ED: see `gate_bias_EF`.
        weigh_input: whether weights multiply the experts' inputs rather than their outputs.

    Returns:
        y [M, D] float32.

    Raises:
        KernelError: `fuses_experts` is false, or shapes do not fit together.
    """
    (M, D), k = x_MD.shape, experts_Mk.shape[-1]
    E, F = gate.shape[0], gate.shape[-1]
    if not fuses_experts(x_MD, gate, up, down):
        raise KernelError(
            "fused_experts: it runs float32 tokens through layers of GroupedWeights of one dtype, "
            "float32 or bfloat16, or of native PackedWeights of one precision, on one CPU with a "
            "C++ compiler; use grouped_matmul"
        )
    if (gate.shape, up.shape, down.shape) != ((E, D, F), (E, D, F), (E, F, D)) or (
        weights_Mk.shape,
        experts_Mk.shape,
    ) != ((M, k), (M, k)):
        raise KernelError(
            f"fused_experts: x{x_MD.shape}, weights{weights_Mk.shape}, experts{experts_Mk.shape}, "
            f"gate{gate.shape}, up{up.shape} and down{down.shape} must be [M, D], [M, k] twice, "
            "[E, D, F] twice and [E, F, D]"
        )
    biases = [
        jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32)
        for bias in (gate_bias_EF, up_bias_EF, down_bias_ED)
    ]
    given = (x_MD, weights_Mk.astype(jnp.float32), experts_Mk.astype(jnp.int32))
    how = {
        "gelu": np.bool_(activation == "gelu_tanh"),
        "clip": np.float32(clip or 0),
        "gain": np.float32(gain),
        "weigh_input": np.bool_(weigh_input),
    }
    # All results but the first are working memory, which the compiler so accounts for.
    y = jax.ShapeDtypeStruct((M, D), jnp.float32)
    inner = jax.ShapeDtypeStruct((M * k, F), jnp.float32)
    outer = jax.ShapeDtypeStruct((M * k, D), jnp.float32)
    if isinstance(gate, PackedWeight):
        call = jax.ffi.ffi_call(
            "fornax_packed_experts", (y, inner, inner, outer), vmap_method="sequential"
        )
        weights = [w for w in (gate, up, down) if isinstance(w, PackedWeight)]
        parts = [part for weight in weights for part in packed.filled(weight.parts)]
        return call(*given, gate.index, *parts, *biases, precision=gate.precision, **how)[0]
    rows = jax.ShapeDtypeStruct((M * k, D), gate.dtype)
    hidden = jax.ShapeDtypeStruct((M * k, F), gate.dtype)
    call = jax.ffi.ffi_call(
        "fornax_fused_experts", (y, rows, hidden, inner, inner, outer), vmap_method="sequential"
    )
    return call(*given, gate.values, up.values, down.values, gate.layer, *biases, **how)[0]
