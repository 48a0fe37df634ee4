"""A denoiser with several adapters, of which each row of a batch has its own, or none.

y = W x + B_a A_a x for the adapter a of a row (Hu et al. 2021). A kernel becomes a weight that
knows this product (`kernels.Weight`), as the adapters of `fornax.llm` do for tokens.

Legend: B rows, T places of a row, K inputs (flattened), R rank, N outputs (flattened), A adapters
and none, L layers of a stack.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax import kernels
from fornax.diffusion.lora.files import Adapter
from fornax.diffusion.models.condition import Condition

__all__ = ["ByRow"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _RowWeight:
    """A weight for `kernels.linear`; of a stack all fields have its axis of layers first."""

    base: jax.Array
    """[*inputs, *outputs]."""
    down_AKR: jax.Array
    up_ARN: jax.Array
    adapters_B: jax.Array
    """int32; 0 for none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        return self.base.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array this stands for."""
        return self.base.dtype

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """Sum over the last `inputs` axes of x [B, ..., *inputs]."""
        y = kernels.linear(x, self.base.astype(x.dtype), inputs=inputs)
        adapters_B = self.adapters_B

        def adapted() -> jax.Array:
            x_BTK = x.reshape(len(adapters_B), -1, self.down_AKR.shape[-2])
            down_BKR, up_BRN = (w[adapters_B].astype(x.dtype) for w in (self.down_AKR, self.up_ARN))
            return y + (x_BTK @ down_BKR @ up_BRN).reshape(y.shape)

        # Steps in which nobody uses an adapter pay for this test only.
        return jax.lax.cond(jnp.any(adapters_B > 0), adapted, lambda: y)


class ByRow(nnx.Module):
    """A denoiser whose rows have the adapter that `Condition.adapter_B` numbers, from 1.

    Attributes:
      denoiser: without adapters.
      config: its.
      paths: of the kernels that an adapter changes.
      down: of each, A [L, A, K, R], L left out where it is not stacked; ranks are filled up to the
        largest. All of it is on each device of a mesh.
      up: of each, B [L, A, R, N].
    """

    def __init__(self, denoiser: Any, adapters: Sequence[tuple[Adapter, float]]):
        """Take adapters of the denoiser, each with the scale of its product."""
        self.denoiser, self.config = denoiser, denoiser.config
        self.paths = tuple(dict.fromkeys(path for adapter, _ in adapters for path in adapter.pairs))
        modules = {"/".join(map(str, at)): each for at, each in nnx.iter_modules(denoiser)}
        pairs = [_matrices(modules[path], path, adapters) for path in self.paths]
        self.down, self.up = (
            nnx.List(nnx.Param(pair[side], axes=(None,) * pair[side].ndim) for pair in pairs)
            for side in (0, 1)
        )

    def __call__(
        self, x_BX: jax.Array, time_B: jax.Array, condition: Condition, **options: Any
    ) -> jax.Array:
        """The denoiser's output, see there."""
        adapters_B = condition.adapter_B
        assert adapters_B is not None, "a pipeline with adapters says each row's"
        pairs = {
            path: (down.get_value(), up.get_value())
            for path, down, up in zip(self.paths, self.down, self.up, strict=True)
        }
        graph, state = nnx.split(self.denoiser)
        found = []
        for path, variable in nnx.to_flat_state(state):
            pair = pairs.get("/".join(map(str, path[:-1]))) if path[-1] == "kernel" else None
            if pair is not None:
                down, up = pair
                rows = jnp.broadcast_to(adapters_B, (*down.shape[:-3], len(adapters_B)))
                variable = variable.replace(_RowWeight(variable.get_value(), down, up, rows))
            found.append((path, variable))
        denoiser = nnx.merge(graph, nnx.from_flat_state(found))
        return denoiser(x_BX, time_B, dataclasses.replace(condition, adapter_B=None), **options)


def _matrices(
    module: Any, path: str, adapters: Sequence[tuple[Adapter, float]]
) -> tuple[jax.Array, jax.Array]:
    """A and B of all adapters for a module, in its compute dtype; zeros where one has none."""
    kernel = module.kernel.get_value()
    stack = kernel.shape[:1] if module.kernel.get_metadata()["axes"][:1] == ("layers",) else ()
    inputs = int(np.prod(kernel.shape[len(stack) : len(stack) + module.num_inputs]))
    outputs = int(np.prod(kernel.shape[len(stack) + module.num_inputs :]))
    rank = max(a.pairs[path][0].shape[-1] for a, _ in adapters if path in a.pairs)
    down = np.zeros((*stack, len(adapters) + 1, inputs, rank), np.float32)
    up = np.zeros((*stack, len(adapters) + 1, rank, outputs), np.float32)
    for number, (adapter, scale) in enumerate(adapters, start=1):
        if path in adapter.pairs:
            a, b = adapter.pairs[path]
            own = a.shape[-1]
            down[..., number, :, :own] = a.reshape(*stack, inputs, own)
            up[..., number, :own, :] = scale * b.reshape(*stack, own, outputs)
    return jnp.asarray(down, module.compute_dtype), jnp.asarray(up, module.compute_dtype)
