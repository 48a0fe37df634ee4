"""What operations over a vocabulary's products share: checks of inputs, made-up calls.

Legend: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError

__all__ = ["ProductsCall", "check_products", "rehearse_products"]


class ProductsCall(Protocol):
    """The sizes of a call."""

    @property
    def tokens(self) -> int:
        """T."""
        ...

    @property
    def width(self) -> int:
        """D."""
        ...

    @property
    def vocabulary(self) -> int:
        """V."""
        ...

    @property
    def dtype(self) -> str:
        """Of x and w."""
        ...


def check_products(
    name: str, x: jax.Array, w_DV: jax.Array, targets: jax.Array, chunk: int, softcap: float | None
) -> None:
    """Check that hidden states, output weights and targets fit together.

    Args:
        name: of the operation, for messages.
        x: [T, D] or [B, T, D].
        w_DV: in the dtype of x.
        targets: integers, [T] or [B, T].
        chunk: tokens that are worked on at once.
        softcap: of the logits, or None.

    Raises:
        KernelError: shapes, dtypes or options that do not.
    """
    if x.ndim not in (2, 3) or w_DV.ndim != 2 or x.shape[-1] != w_DV.shape[0]:
        raise KernelError(
            f"{name}: x{x.shape} and w{w_DV.shape} must be [T, D] (or [B, T, D]) and "
            "[D, V]; transpose tied embeddings"
        )
    if targets.shape != x.shape[:-1]:
        raise KernelError(
            f"{name}: targets{targets.shape} need one value per token: {x.shape[:-1]}"
        )
    if x.dtype != w_DV.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelError(
            f"{name}: x is {x.dtype} and w {w_DV.dtype}; cast both to one float dtype"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise KernelError(f"{name}: targets must be integers, not {targets.dtype}")
    if chunk < 1:
        raise KernelError(f"{name}: chunk={chunk} must be 1 or more")
    if softcap is not None and not softcap > 0:
        raise KernelError(f"{name}: softcap={softcap} must be above 0; use None for none")


def rehearse_products(
    call: ProductsCall, loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> Callable[[], Any]:
    """Return a function that computes a loss and its gradients on made-up arrays.

    Args:
        call: how large they are.
        loss: (x_TD, w_DV, targets_T) to a scalar; differentiated by the first two.
    """
    rng = np.random.default_rng(0)
    x_TD = jnp.asarray(rng.normal(size=(call.tokens, call.width)), call.dtype)
    w_DV = jnp.asarray(rng.normal(size=(call.width, call.vocabulary)), call.dtype)
    targets_T = jnp.asarray(rng.integers(0, call.vocabulary, call.tokens), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, targets_T), (0, 1)))
    return lambda: step(x_TD, w_DV)
