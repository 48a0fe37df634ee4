"""Adapters folded into the weights: W + s B A, or m (W + s B A) / |W + s B A| for DoRA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.adapters.attach import adapted_modules, make_plain
from fornax.adapters.module import Spec, adapter_factors, base_kernel, dora_norm
from fornax.config.errors import ConfigError

__all__ = ["merge", "merged", "merged_kernel", "merged_params", "unmerge"]


def merged_kernel(module: Any) -> jax.Array:
    """An adapted module's kernel with the adapter in it, in the base's dtype, stacked or not."""
    spec: Spec = module.lora
    kernel = base_kernel(module)
    a, b = adapter_factors(module)
    delta = spec.layout.product(a, spec.scale * b)
    whole = kernel.astype(jnp.float32) + delta
    if spec.dora:
        whole = spec.layout.scaled(whole, module.lora_magnitude.get_value() / dora_norm(module))
    return whole.astype(kernel.dtype)


def merged(model: Any) -> Any:
    """A model of the base's own classes whose weights have the adapters in them.

    What has no adapter is shared with `model`, which stays as it is. Works while tracing.
    """
    copy = nnx.merge(*nnx.split(model))
    for _, module in list(adapted_modules(copy)):
        make_plain(module, merged_kernel(module))
    return copy


def merged_params(model: nnx.Module) -> dict[str, Any]:
    """The parameters of `merged(model)` as nested dicts under the base's own paths."""
    return nnx.to_pure_dict(nnx.state(merged(model), nnx.Param))


def merge(model: nnx.Module) -> None:
    """Fold the adapters into the weights, in place, keeping the base's beside for `unmerge`.

    Raises:
        ConfigError: they are merged already.
    """
    for path, module in adapted_modules(model):
        if module.lora.merged:
            raise ConfigError(f"{path} is merged already; call unmerge first")
        whole = merged_kernel(module)
        module.kernel_base = module.kernel
        module.kernel = nnx.Param(whole, **module.kernel_base.get_metadata())
        module.lora = dataclasses.replace(module.lora, merged=True)


def unmerge(model: nnx.Module) -> None:
    """Undo `merge`, exactly.

    Raises:
        ConfigError: nothing is merged.
    """
    found = [module for _, module in adapted_modules(model) if module.lora.merged]
    if not found:
        raise ConfigError("nothing is merged in this model; call merge first")
    for module in found:
        module.kernel = module.kernel_base
        del module.kernel_base
        module.lora = dataclasses.replace(module.lora, merged=False)
