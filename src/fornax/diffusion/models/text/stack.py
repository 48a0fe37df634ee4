"""Running the equal layers of a text encoder by one scan.

Legend: B batch, S tokens, D model width, L layers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.config.errors import ConfigError

__all__ = ["check_tokens", "run_stack"]


def run_stack(
    layers: nnx.Module,
    x_BSD: jax.Array,
    run: Callable[[nnx.Module, jax.Array], jax.Array],
    *,
    keep: int,
) -> tuple[jax.Array, jax.Array]:
    """Run layers stacked along a leading axis of their parameters, as `models.stack_layers` makes.

    Args:
      layers: the stack.
      x_BSD: what the first layer takes.
      run: one layer and its input to its output.
      keep: after how many layers the states are kept, 0 for what goes in.

    Returns:
      x [B, S, D] after all layers, and what was kept, of the same shape.
    """
    graphdef, stacked = nnx.split(layers)

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array], layer: nnx.State
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        x_BSD, kept_BSD, done = carry
        x_BSD, done = run(nnx.merge(graphdef, layer), x_BSD), done + 1
        return (x_BSD, jnp.where(done == keep, x_BSD, kept_BSD), done), None

    with jax.named_scope("layers"):
        (x_BSD, kept_BSD, _), _ = jax.lax.scan(body, (x_BSD, x_BSD, jnp.int32(0)), stacked)
    return x_BSD, kept_BSD


def check_tokens(tokens_BS: jax.Array, mask_BS: jax.Array | None, most: int | None) -> None:
    """Check the shapes of token ids and their mask.

    Raises:
      ConfigError: they are not integers [B, S] of one shape, or S is more than `most`.
    """
    if tokens_BS.ndim != 2 or not jnp.issubdtype(tokens_BS.dtype, jnp.integer):
        raise ConfigError(
            f"token ids of shape {tokens_BS.shape} and dtype {tokens_BS.dtype} are not what a text "
            "encoder takes; pass int32 [batch, tokens]"
        )
    if mask_BS is not None and mask_BS.shape != tokens_BS.shape:
        raise ConfigError(
            f"a mask of shape {mask_BS.shape} does not fit token ids of shape {tokens_BS.shape}; "
            "pass 1 for a token and 0 for padding, one for each"
        )
    if most is not None and tokens_BS.shape[1] > most:
        raise ConfigError(
            f"{tokens_BS.shape[1]} tokens are more than the {most} positions of this text encoder; "
            f"cut the text to {most} tokens"
        )
