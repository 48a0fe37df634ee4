"""Making a decoder's parameters: abstractly, or directly where they will live."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from fornax.mesh import DEFAULT_RULES, Rules, tree_shardings
from fornax.models.config import DecoderConfig
from fornax.models.decoder import Decoder

__all__ = ["abstract_decoder", "create_decoder"]


def abstract_decoder(
    config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, compute_dtype: DTypeLike | None = None
) -> Decoder:
    """A decoder whose variables hold `jax.ShapeDtypeStruct`s: nothing is allocated.

    Args:
      config: what the model is.
      dtype: parameter dtype.
      compute_dtype: see `Decoder`.
    """
    return nnx.merge(*_shapes(*_kind(config, dtype, compute_dtype)), copy=True)


def create_decoder(
    config: DecoderConfig,
    *,
    seed: int | jax.Array = 0,
    dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Decoder:
    """A decoder with freshly drawn parameters, made in one compiled call.

    With a mesh each device makes only its own part; the values do not depend on the mesh.

    Args:
      config: what the model is.
      seed: an integer or a PRNG key.
      dtype: parameter dtype.
      compute_dtype: see `Decoder`.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.

    Raises:
      ShardingError: when a parameter does not divide over the mesh.
    """
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    kind = _kind(config, dtype, compute_dtype)
    graphdef, state = _shapes(*kind)
    where = None
    if mesh is not None:
        leaves, tree = jax.tree.flatten(tree_shardings(state, mesh, rules))
        where = tuple(leaves), tree
    return nnx.merge(graphdef, _drawing(*kind, where)(key))


def _kind(
    config: DecoderConfig, dtype: DTypeLike, compute_dtype: DTypeLike | None
) -> tuple[DecoderConfig, DTypeLike, DTypeLike | None]:
    return config, jnp.dtype(dtype), None if compute_dtype is None else jnp.dtype(compute_dtype)


@functools.lru_cache(maxsize=32)
def _shapes(
    config: DecoderConfig, dtype: DTypeLike, compute_dtype: DTypeLike | None
) -> tuple[Any, Any]:
    """Tracing all layers takes seconds for a large model, and most programs need it a few times."""
    return nnx.split(
        nnx.eval_shape(
            lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, compute_dtype=compute_dtype)
        )
    )


@functools.lru_cache(maxsize=8)
def _drawing(
    config: DecoderConfig,
    dtype: DTypeLike,
    compute_dtype: DTypeLike | None,
    where: tuple[tuple, object] | None,
) -> Callable[[jax.Array], Any]:
    """The compiled call; another model of the same kind takes it over."""

    def draw(key: jax.Array) -> Any:
        rngs = nnx.Rngs(params=key)
        return nnx.state(Decoder(config, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype))

    shardings = None if where is None else jax.tree.unflatten(where[1], where[0])
    return jax.jit(draw, out_shardings=shardings)
