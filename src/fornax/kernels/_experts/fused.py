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

__all__ = ["fused_experts", "fuses_experts"]


def fuses_experts(x: jax.Array, *weights: object) -> bool:
    """Whether `fused_experts` can run tokens x [..., D] through these weights here."""
    dtypes = {weight.dtype for weight in weights if isinstance(weight, GroupedWeight)}
    return (
        native.takes(x)
        and all(isinstance(weight, GroupedWeight) for weight in weights)
        and dtypes in ({jnp.dtype(jnp.float32)}, {jnp.dtype(jnp.bfloat16)})
        and x.dtype == jnp.float32
    )


def fused_experts(
    x_MD: jax.Array,
    weights_Mk: jax.Array,
    experts_Mk: jax.Array,
    gate: GroupedWeight,
    up: GroupedWeight,
    down: GroupedWeight,
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
    before they are multiplied, as `grouped_matmul` does.

    Args:
        x_MD: float32.
        weights_Mk: float32.
        experts_Mk: int32, all of a token different; E and above for none.
        gate: one layer [E, D, F], float32 or bfloat16.
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
            "float32 or bfloat16, on one CPU with a C++ compiler; use grouped_matmul"
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
    # All but the first are working memory, which the compiler so accounts for.
    results = (
        jax.ShapeDtypeStruct((M, D), jnp.float32),
        jax.ShapeDtypeStruct((M * k, D), gate.dtype),
        jax.ShapeDtypeStruct((M * k, F), gate.dtype),
        jax.ShapeDtypeStruct((M * k, F), jnp.float32),
        jax.ShapeDtypeStruct((M * k, F), jnp.float32),
        jax.ShapeDtypeStruct((M * k, D), jnp.float32),
    )
    call = jax.ffi.ffi_call("fornax_fused_experts", results, vmap_method="sequential")
    y_MD, *_ = call(
        x_MD,
        weights_Mk.astype(jnp.float32),
        experts_Mk.astype(jnp.int32),
        gate.values,
        up.values,
        down.values,
        gate.layer,
        *biases,
        gelu=np.bool_(activation == "gelu_tanh"),
        clip=np.float32(clip or 0),
        gain=np.float32(gain),
        weigh_input=np.bool_(weigh_input),
    )
    return y_MD
