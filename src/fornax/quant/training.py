"""Training in 8 bits: which weights of a decoder multiply codes, and the decoder that does."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few, similar
from fornax.mesh import MeshConfig, check_use
from fornax.models import Decoder, DecoderConfig, abstract_decoder, check_model
from fornax.models.layout import flat_variables, num_inputs
from fornax.quant.config import QuantConfig
from fornax.quant.leaves import ROUTERS

__all__ = ["check_training", "quantize_products", "quantized_kernels"]

_USE = "train in 8 bits"
"""What the tables of models and of mesh axes call it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Weight:
    """A weight whose products multiply codes; stacked like the array in it."""

    array: jax.Array
    noise: jax.Array
    """uint32 scalar, one for each layer of a stack."""
    scheme: str = field(metadata={"static": True})
    axes: tuple[str | None, ...] = field(metadata={"static": True})
    """Logical axes of one layer's."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> DTypeLike:
        return self.array.dtype

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """See `kernels.Weight`."""
        return kernels.quantized_linear(
            x, self.array, self.noise, scheme=self.scheme, inputs=inputs, axes=self.axes
        )


def check_training(config: QuantConfig, model: DecoderConfig, mesh: MeshConfig) -> None:
    """Refuse a run whose scheme its model or its mesh does not take.

    Raises:
      ConfigError: naming the part or the axis, and what to do instead; for a pattern of `exclude`
        that finds no weight, or patterns that leave none.
    """
    if config.scheme is None:
        return
    check_model(model, _USE)
    check_use(mesh, _USE)
    quantized_kernels(abstract_decoder(model), config.exclude)


def quantized_kernels(decoder: Decoder, exclude: Sequence[str]) -> Mapping[str, Any]:
    """The weights whose products are in 8 bits, by path, such as layers/attention/q/kernel.

    They are the linear layers of the layers; routers, embeddings and the output projection are not
    among them.

    Args:
      decoder: of arrays or shapes.
      exclude: regular expressions (`re.search`) over paths, of those that are not either.

    Raises:
      ConfigError: for a pattern that finds no weight, or when none is left.
    """
    found = {
        path: variable
        for path, variable in flat_variables(decoder).items()
        if path.startswith("layers/") and num_inputs(decoder, path) and not path.endswith(ROUTERS)
    }
    for pattern in exclude:
        if not any(re.search(pattern, path) for path in found):
            near = similar(re.sub(r"[^\w/]", "", pattern), found) or [*found]
            raise ConfigError(
                f"quant.exclude: the pattern {pattern!r} finds no weight; near it are "
                f"{first_few(near)}, and what is outside the layers or a router is left out anyway"
            )
    left = {
        path: variable
        for path, variable in found.items()
        if not any(re.search(pattern, path) for pattern in exclude)
    }
    if not left:
        raise ConfigError(
            "quant.exclude leaves no weight for quant.scheme; exclude fewer, or set scheme to null"
        )
    return left


def quantize_products(decoder: Decoder, config: QuantConfig, key: jax.Array | None) -> Decoder:
    """A decoder over the same arrays whose weights multiply codes, for one forward pass.

    Args:
      decoder: of arrays; it stays as it is.
      config: the scheme, and what is excluded.
      key: of the random bits of the backward pass; None where there is none, as in evaluation.
    """
    if config.scheme is None:
        return decoder
    graphdef, state = nnx.split(decoder)
    copy = nnx.merge(graphdef, state, copy=True)
    key = jax.random.key(0) if key is None else key
    for number, (_, variable) in enumerate(sorted(quantized_kernels(copy, config.exclude).items())):
        array = variable.get_value()
        noise = jax.random.bits(jax.random.fold_in(key, number), array.shape[:1], jnp.uint32)
        axes = variable.get_metadata()["axes"][1:]
        variable.set_value(_Weight(array, noise, config.scheme, axes))
    return copy
