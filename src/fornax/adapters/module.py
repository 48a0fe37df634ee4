"""A linear module with an adapter: the module's own class, extended.

y = W x + s B A x, and with DoRA y = m / |W + s B A| (W x + s B A x), the norm over the inputs of
each output and taken as a constant by the gradient (Liu et al. 2024, section 4.3).

The base's parameters keep their names: what laid them out, loaded or sharded them continues
working.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.adapters.experts import LoRAExperts, remaking
from fornax.adapters.kinds import Kind, kind_of
from fornax.adapters.quantize import Blocks, dequantize
from fornax.mesh import mesh_in_use
from fornax.models.experts import ExpertProjection
from fornax.models.kernel_layout import KernelLayout
from fornax.models.scope import scoped

__all__ = [
    "LoRAParam",
    "QuantizedParam",
    "Spec",
    "adapted_class",
    "adapter_factors",
    "base_kernel",
    "dora_norm",
    "is_adapted_module",
]


class LoRAParam(nnx.Param):
    """A parameter of an adapter."""


class QuantizedParam(nnx.Param):
    """Codes or scales of a quantized base weight: never trained."""


@dataclass(frozen=True)
class Spec:
    """What is fixed about a module's adapter."""

    layout: KernelLayout
    rank: int
    scale: float
    """What B A is multiplied by."""
    rslora: bool = False
    dora: bool = False
    dropout: bool = False
    blocks: Blocks | None = None
    """How the base kernel is quantized; None where it is an array."""
    active: bool = True
    """False: the module computes what its base does."""
    merged: bool = False
    """Whether the kernel holds the adapter's product already, and `kernel_base` the base's."""


@scoped
def _call(self: Any, x: jax.Array, *arguments: Any, **named: Any) -> jax.Array:
    """The base's output for x, and the adapter's."""
    spec: Spec = self.lora
    y = _base_output(self, x, *arguments, **named)
    if not spec.active or spec.merged:
        return y
    kind = kind_of(self)
    assert kind is not None
    with jax.named_scope("adapter"):
        given = self.lora_dropout(x) if spec.dropout else x
        a, b = (part.get_value().astype(y.dtype) for part in (self.lora_a, self.lora_b))
        delta = kind.through(self, given.astype(y.dtype), a, b * spec.scale, *arguments, **named)
        if not spec.dora:
            return y + delta
        return y + delta + _turned(self, kind, y, delta, *arguments, **named)


def _turned(
    module: Any, kind: Kind, y: jax.Array, delta: jax.Array, *arguments: Any, **named: Any
) -> jax.Array:
    """What DoRA adds: (m / |W + s B A| - 1) (W x + s B A x), the base's bias left out."""
    change = module.lora_magnitude.get_value() / dora_norm(module) - 1
    base = y
    if module.bias is not None:
        bias = module.bias.get_value().astype(y.dtype)
        base = y - kind.bias(module, bias, y, *arguments, **named)
    factor = kind.spread(module, change.astype(y.dtype), y, *arguments, **named)
    return factor * (base + delta)


def dora_norm(module: Any) -> jax.Array:
    """|W + s B A| of each output, float32, a constant to the gradient."""
    spec: Spec = module.lora
    a, b = (jax.lax.stop_gradient(x) for x in adapter_factors(module))
    kernel = jax.lax.stop_gradient(base_kernel(module))
    return jnp.sqrt(jnp.maximum(spec.layout.squares(kernel, a, b * spec.scale), 0))


def adapter_factors(module: Any) -> tuple[jax.Array, jax.Array]:
    """A and B, stacked or not; where experts share them, repeated for each expert."""
    a, b = module.lora_a.get_value(), module.lora_b.get_value()
    if not module.lora.layout.shared:
        return a, b
    experts = module.kernel.get_value().shape[-3]

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (*x.shape[:-3], experts, *x.shape[-2:]))

    return repeated(a), repeated(b)


def base_kernel(module: Any) -> jax.Array:
    """The base's kernel as an array, stacked or not."""
    spec: Spec = module.lora
    kernel = module.kernel_base if spec.merged else module.kernel
    if spec.blocks is None:
        return kernel.get_value()
    return dequantize(kernel.get_value(), module.kernel_scale.get_value(), spec.blocks)


def _base_output(module: Any, x: jax.Array, *arguments: Any, **named: Any) -> jax.Array:
    spec: Spec = module.lora
    if spec.blocks is None or spec.merged:
        return type(module).adapted_from.__call__(module, x, *arguments, **named)
    y = _product_of_codes(module, spec.blocks, x, *arguments, **named)
    if module.bias is None:
        return y
    kind = kind_of(module)
    assert kind is not None
    bias = module.bias.get_value().astype(y.dtype)
    return y + kind.bias(module, bias, y, *arguments, **named)


def _product_of_codes(
    module: Any, blocks: Blocks, x: jax.Array, *arguments: Any, **named: Any
) -> jax.Array:
    """The base's product, without its bias."""
    base = type(module).adapted_from

    def apply(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        plain = object.__new__(base)
        kernel = nnx.Param(dequantize(codes, scale, blocks))
        vars(plain).update({**vars(module), "kernel": kernel, "bias": None, "use_bias": False})
        return base.__call__(plain, x, *arguments, **named)

    return remaking(apply, x, module.kernel.get_value(), module.kernel_scale.get_value())


def _weight(self: Any, dtype: DTypeLike) -> Any:
    """What computes the products of an `ExpertProjection` with adapters."""
    spec: Spec = self.lora
    if spec.merged:
        return type(self).adapted_from.weight(self, dtype)
    # Codes are divided over a mesh in other places than what they stand for.
    in_codes = spec.blocks is not None and mesh_in_use() is None
    if in_codes:
        base = (self.kernel.get_value(), self.kernel_scale.get_value())
    else:
        base = base_kernel(self).astype(dtype)
    a = b = change = None
    if spec.active:
        a, b = adapter_factors(self)
        a, b = a.astype(dtype), (spec.scale * b).astype(dtype)
    if spec.active and spec.dora:
        change = (self.lora_magnitude.get_value() / dora_norm(self) - 1).astype(dtype)
    return LoRAExperts(
        base=base,
        a_EKR=a,
        b_ERN=b,
        change_EN=change,
        blocks=spec.blocks if in_codes else None,
    )


@functools.cache
def adapted_class(base: type) -> type:
    """The class of a `base` module with an adapter; the same for each call.

    Its objects have these attributes more than the base's:
        lora: the `Spec`.
        lora_a: A transposed, float32 [*stack, *batch, *inputs, R]; batch is 1 where it is shared.
        lora_b: B transposed, float32 [*stack, *batch, R, *outputs]; likewise.
        lora_magnitude: float32 [*stack, *batch, *outputs], with DoRA.
        lora_dropout: an `nnx.Dropout`, where there is some.
    """
    computes = {"weight": _weight} if issubclass(base, ExpertProjection) else {"__call__": _call}
    return type(f"Adapted{base.__name__}", (base,), {**computes, "adapted_from": base})


def is_adapted_module(module: nnx.Module) -> bool:
    """Whether a module is of an `adapted_class`."""
    return hasattr(type(module), "adapted_from")
