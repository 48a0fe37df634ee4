"""Inputs of products, rounded as engines that multiply codes round them.

|x| the greatest magnitude of a token or group: scales are |x| over the greatest code, as vLLM has
them; of MXFP4 the power of two at or below |x| / 4, the next one where |x| / 4 is 7/4 of it or
more, and of NVFP4 float8, divided by one float32 that the file has (compressed-tensors 0.20,
`mxfp_utils.py` and `helpers.py`).

Legend: R rows, K inputs, G groups of inputs, g inputs of a group, E experts.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fornax.quant.leaves import Leaf
from fornax.quant.rounding import rounded_to
from fornax.quant.schemes import Inputs

__all__ = ["RoundedInputs", "find_roundings"]

_E4M3, _E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["divisor_E"], meta_fields=["rule"]
)
@dataclass(frozen=True, kw_only=True)
class RoundedInputs:
    """The inputs of a weight, or of those of all experts, rounded."""

    rule: Inputs
    divisor_E: jax.Array | None = None
    """float32 [E], or [1] where there are no experts: by what scales of float8 are divided."""

    def __call__(self, x_RK: jax.Array, experts_R: jax.Array | None = None) -> jax.Array:
        """Round, each row by itself; the result has the dtype of x.

        Args:
          x_RK: floats; R may be several axes where there are no experts.
          experts_R: int32, whose the rows are; None where there are no experts.
        """
        (*rows, K), rule = x_RK.shape, self.rule
        g = rule.group or K
        padded = jnp.pad(x_RK.astype(jnp.float32), [*[(0, 0)] * len(rows), (0, -K % g)])
        x_RGg = padded.reshape(*rows, -1, g)
        most_RG1 = jnp.max(jnp.abs(x_RGg), axis=-1, keepdims=True)
        if rule.scales == "e8m0":
            scales_RG1 = _powers_of_two(most_RG1)
        elif self.divisor_E is not None:
            of_row = 0 if experts_R is None else experts_R
            divisor = self.divisor_E[of_row].reshape(-1, 1, 1)
            scales_RG1 = rounded_to(jnp.minimum(divisor * (most_RG1 / 6), 448), _E4M3)
            scales_RG1 = jnp.where(scales_RG1 == 0, 0.125, scales_RG1) / divisor
        else:
            scales_RG1 = most_RG1 / (448 if rule.type == "float" else 2 ** (rule.bits - 1) - 1)
        scales_RG1 = jnp.where(scales_RG1 == 0, jnp.finfo(jnp.float32).eps, scales_RG1)
        rounded = _nearest(x_RGg / scales_RG1, rule) * scales_RG1
        return rounded.reshape(padded.shape)[..., :K].astype(x_RK.dtype)


def _powers_of_two(most: jax.Array) -> jax.Array:
    """Of MXFP4: adding a quarter of the mantissa's range carries 7/4 over into the exponent."""
    bits = jax.lax.bitcast_convert_type(most, jnp.int32) + (1 << 21)
    exponent = jnp.clip((bits >> 23) - 2, 1, 254)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _nearest(x: jax.Array, rule: Inputs) -> jax.Array:
    """The numbers of the type that are nearest, ties to even codes."""
    if rule.type == "int":
        half = 2 ** (rule.bits - 1)
        return jnp.clip(jnp.round(x), -half, half - 1)
    codes, most = (_E4M3, 448) if rule.bits == 8 else (_E2M1, 6)
    return rounded_to(jnp.clip(x, -most, most), codes)


def find_roundings(
    leaves: Sequence[Leaf], notes: Mapping[str, Mapping[str, Any]]
) -> dict[str, RoundedInputs]:
    """How inputs of leaves' parameters are rounded, by path in the layer or outside the layers.

    Args:
      leaves: of one layer, or those outside the layers.
      notes: of what was done to each, by name of its tensor.
    """
    rules: dict[str, Inputs] = {}
    divisors: dict[str, dict[int, float]] = {}
    for leaf in leaves:
        if leaf.scheme is None or leaf.scheme.inputs is None:
            continue
        first = 0 if leaf.expert is None else leaf.expert
        for path in leaf.parameters:
            inner = path.removeprefix("layers/")
            rules[inner] = leaf.scheme.inputs
            given = notes[leaf.tensor.name].get("input_divisors", [])
            divisors.setdefault(inner, {}).update(enumerate(given, first))
    return {
        path: RoundedInputs(
            rule=rule,
            divisor_E=jnp.array([found[expert] for expert in sorted(found)], jnp.float32)
            if (found := divisors[path])
            else None,
        )
        for path, rule in rules.items()
    }
