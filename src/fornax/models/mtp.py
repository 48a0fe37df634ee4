"""Multi-token prediction: modules after the layers that predict further tokens.

Training runs all of them, as losses beside the next token's; the engine runs the first one, again
and again, as its own draft.

Legend: B batch, T tokens, D model width.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.mesh import constrain
from fornax.models.attend import KeyValueCache, LayerCache, Place
from fornax.models.config import DecoderConfig
from fornax.models.context import LayerContext
from fornax.models.layers import make_layer
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection
from fornax.models.remat import Remat
from fornax.models.routing import Routing
from fornax.models.scan import is_weight, pick_layer, run_layers
from fornax.models.scope import scoped
from fornax.models.stack import stack_layers

__all__ = ["MTPModule", "make_modules", "run_first_module_cached", "run_modules"]


CacheT = TypeVar("CacheT", bound=KeyValueCache)


class MTPModule(nnx.Module):
    """One module, or a stack of them (DeepSeek-AI 2024, arXiv:2412.19437, equations 21 to 23).

    h'_i = norm(layer(projection [norm(embedding of token i + k); norm(h_i)])), where h_i is what
    the output projection reads of token i in the model (module k = 1) or in module k - 1. The same
    output projection makes of h'_i the logits of token i + k + 1. This is what released files of
    DeepSeek V3, GLM-4.5 and Qwen3-Next hold and vLLM computes: the embedding comes first, and h is
    taken after the norm before the output projection.

    Attributes:
      embed_norm: of the embedding.
      hidden_norm: of the hidden state.
      projection: [2 D, D].
      layer: a layer of the kind `DecoderConfig.mtp_kind`.
      norm: before the output projection.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the parameters."""
        D = config.hidden_size
        make: dict[str, Any] = {"rngs": rngs, "dtype": dtype, "compute_dtype": compute_dtype}
        self.embed_norm = RMSNorm((D,), config, dtype=dtype)
        self.hidden_norm = RMSNorm((D,), config, dtype=dtype)
        std = config.initializer_range
        self.projection = Projection({"mlp": 2 * D}, {"embed": D}, bias=False, std=std, **make)
        self.layer = make_layer(config, config.mtp_kind, **make)
        self.norm = RMSNorm((D,), config, dtype=dtype, divisor=config.logits_scaling)

    @scoped
    def layer_input(self, x_BTD: jax.Array, embedded_BTD: jax.Array) -> jax.Array:
        """What the layer reads, [B, T, D], of hidden states and embeddings."""
        both = (self.embed_norm(embedded_BTD), self.hidden_norm(x_BTD))
        # Each device puts the whole row together and takes its part of it: XLA would else exchange
        # parts, and divide the stream of all layers before it.
        row_BTX = constrain(jnp.concatenate(both, axis=-1), ("batch", "length", None))
        row_BTX = constrain(row_BTX, ("batch", "length", "activation_mlp"))
        y_BTD = self.projection(row_BTX)
        return constrain(y_BTD, ("batch", "length", "activation_embed"))

    @scoped
    def output(self, x_BTD: jax.Array) -> jax.Array:
        """What the output projection reads, [B, T, D], of the layer's."""
        return self.norm(x_BTD)


def make_modules(
    config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
) -> MTPModule:
    """The model's modules, as one whose parameters have a leading "layers" axis."""

    def make(own: nnx.Rngs) -> MTPModule:
        return MTPModule(config, rngs=own, dtype=dtype, compute_dtype=compute_dtype)

    return stack_layers(make, config.num_mtp_modules, rngs)


def run_modules(
    modules: MTPModule,
    config: DecoderConfig,
    x_BTD: jax.Array,
    embedded: Callable[[int], jax.Array],
    context: LayerContext,
    *,
    remat: str | Remat = "none",
    unroll: int | bool = 1,
) -> tuple[list[jax.Array], list[Routing]]:
    """Run all modules without a cache.

    Args:
      modules: the stack.
      config: the model's.
      x_BTD: the final norm's output.
      embedded: k to the embeddings [B, T, D] of the k-th token after each; of a token beyond the
        row any will do.
      context: what the layers share.
      remat: what the backward pass computes again of each layer.
      unroll: see `run_layers`.

    Returns:
      Each module's output [B, T, D], which only means something where all tokens up to the k-th
      after it are of one document; and what the routers did, a leading axis over layers in each.
    """
    graphdef, stack = nnx.split(modules)
    kinds = (config.mtp_kind,)
    found: list[jax.Array] = []
    routings: list[Routing] = []
    for index in range(config.num_mtp_modules):
        one = stack
        if config.num_mtp_modules > 1:
            one = jax.tree.map(lambda leaf, at=index: leaf[at : at + 1], stack)
        module: MTPModule = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], one))
        layers = nnx.merge(graphdef, one).layer
        x_BTD = module.layer_input(x_BTD, embedded(index + 1))
        with jax.named_scope("layer"):
            x_BTD, routing = run_layers(layers, kinds, x_BTD, context, remat=remat, unroll=unroll)
        x_BTD = module.output(x_BTD)
        found.append(x_BTD)
        routings += [] if routing is None else [routing]
    return found, routings


def run_first_module_cached(
    modules: MTPModule,
    config: DecoderConfig,
    x_BTD: jax.Array,
    embedded_BTD: jax.Array,
    context: LayerContext,
    cache: CacheT,
) -> tuple[jax.Array, CacheT]:
    """Run the first module, whose layer's keys and values come after those of all other layers.

    Args:
      modules: the stack.
      config: the model's.
      x_BTD: hidden states: the final norm's output, or that of this function.
      embedded_BTD: embeddings of the token after each.
      context: what the layers share.
      cache: of a model with modules, see `KeyValueCache`.

    Returns:
      The module's output [B, T, D], and the cache with its keys and values.
    """
    graphdef, stack = nnx.split(modules)
    first = jnp.int32(0)
    one = jax.tree.map(lambda leaf: pick_layer(leaf, first), stack, is_leaf=is_weight)
    module: MTPModule = nnx.merge(graphdef, one)
    kind = config.mtp_kind
    before = [each for each in config.layer_kinds() if each.attention == kind.attention]
    before = [each for each in before if each.keys != "shared"]
    alike = [each for each in before if each.window == kind.window]
    place = Place(layer=jnp.int32(len(before)), among=jnp.int32(len(alike)))
    x_BTD = module.layer_input(x_BTD, embedded_BTD)
    with jax.named_scope("layer"):
        y_BTD, after, _ = module.layer(x_BTD, kind, context, LayerCache(cache, place))
    return module.output(y_BTD), after.cache
