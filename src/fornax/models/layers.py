"""One layer of a decoder, or a stack of them; `scan.py` runs the stack.

Legend: B batch, T query tokens, D model width.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.kernels import checkpoint_name
from fornax.mesh import constrain
from fornax.models.attend import LayerCache, PassKeys
from fornax.models.attention import Attention
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.experts import Experts
from fornax.models.gated_delta import GatedDeltaNet
from fornax.models.latent import LatentAttention
from fornax.models.layer_inputs import LayerInput, LayerScale
from fornax.models.mamba import Mamba2
from fornax.models.mlp import MLP
from fornax.models.norm import RMSNorm
from fornax.models.routing import Routing
from fornax.models.scope import scoped

__all__ = ["DecoderLayer", "make_layer"]


class DecoderLayer(nnx.Module):
    """Attention of some kind, and an MLP, experts or neither, each branch with its norms.

    Of a stack of layers, each part is stacked over those layers that have it.
    """

    def __init__(self, parts: Mapping[str, nnx.Module]):
        """Put a layer together of the parts that its kind has; the others are None."""
        self.attention_norm: Any = parts.get("attention_norm")
        self.attention: Any = parts.get("attention")
        self.global_attention: Any = parts.get("global_attention")
        self.shared_attention: Any = parts.get("shared_attention")
        self.global_shared_attention: Any = parts.get("global_shared_attention")
        self.latent: Any = parts.get("latent")
        self.gated_delta: Any = parts.get("gated_delta")
        self.mamba2: Any = parts.get("mamba2")
        self.post_attention_norm: Any = parts.get("post_attention_norm")
        self.mlp_norm: Any = parts.get("mlp_norm")
        self.mlp: Any = parts.get("mlp")
        self.wide_mlp: Any = parts.get("wide_mlp")
        self.experts: Any = parts.get("experts")
        self.post_mlp_norm: Any = parts.get("post_mlp_norm")
        self.layer_input: Any = parts.get("layer_input")
        self.layer_scale: Any = parts.get("layer_scale")

    def parts(self) -> dict[str, nnx.Module]:
        """The parts that there are, by attribute."""
        return {name: part for name, part in vars(self).items() if isinstance(part, nnx.Module)}

    @scoped
    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | PassKeys | None = None,
    ) -> tuple[jax.Array, Any, Routing | None]:
        """Run the layer; returns x [B, T, D], the updated cache layer, and what its router did."""
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        branch, cache = getattr(self, kind.attention_part)(
            _maybe(self.attention_norm, x_BTD), kind, context, cache
        )
        branch = _scaled(_maybe(self.post_attention_norm, branch), kind)
        x_BTD, routing = self._second(x_BTD, branch, kind, context)
        if self.layer_input is not None:
            x_BTD = x_BTD + self.layer_input(x_BTD, context.layer_input_BTP)
        if self.layer_scale is not None:
            x_BTD = self.layer_scale(x_BTD)
        return constrain(x_BTD, ("batch", "length", "activation_embed")), cache, routing

    def _second(
        self, x_BTD: jax.Array, branch_BTD: jax.Array, kind: LayerKind, context: LayerContext
    ) -> tuple[jax.Array, Routing | None]:
        """Attention's branch added, then the residual stream after the MLP or the experts, and what
        the router did."""
        if kind.mlp == "none":
            return x_BTD + branch_BTD, None
        if self.mlp_norm is None:
            normed = x_BTD = x_BTD + branch_BTD
        else:
            x_BTD, normed = self.mlp_norm.of_sum(x_BTD, branch_BTD)
        routing = None
        if kind.mlp == "experts":
            branch, routing = self.experts(normed, context, x_BTD)
        else:
            branch = getattr(self, kind.mlp_part)(normed)
        return x_BTD + _scaled(_maybe(self.post_mlp_norm, branch), kind), routing


def make_layer(
    config: DecoderConfig,
    kind: LayerKind,
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike,
    compute_dtype: DTypeLike,
) -> DecoderLayer:
    """A layer of a kind with fresh parameters."""
    make = {"rngs": rngs, "dtype": dtype, "compute_dtype": compute_dtype}
    norm = functools.partial(RMSNorm, (config.hidden_size,), config, dtype=dtype)
    wide = 2 * config.intermediate_size
    makers: dict[str, Callable[[], nnx.Module]] = {
        **dict.fromkeys(_ATTENTION, functools.partial(Attention, config, kind, **make)),
        "latent": functools.partial(LatentAttention, config, **make),
        "gated_delta": functools.partial(GatedDeltaNet, config, **make),
        "mamba2": functools.partial(Mamba2, config, **make),
        "mlp": functools.partial(MLP, config, **make),
        "wide_mlp": functools.partial(MLP, config, width=wide, **make),
        "layer_input": functools.partial(LayerInput, config, **make),
        "layer_scale": functools.partial(LayerScale, dtype=dtype),
        "experts": functools.partial(Experts, config, **make),
    }
    return DecoderLayer({part: makers.get(part, norm)() for part in kind.parts()})


_ATTENTION = ("attention", "global_attention", "shared_attention", "global_shared_attention")


def _maybe(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _scaled(branch_BTD: jax.Array, kind: LayerKind) -> jax.Array:
    factor = kind.residual_multiplier
    return branch_BTD if factor == 1.0 else branch_BTD * jnp.asarray(factor, branch_BTD.dtype)
