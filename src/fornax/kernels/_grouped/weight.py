"""The matrices of all layers in one array, of which a grouped product reads one layer in place.

Legend: L layers, E groups, K inputs, N outputs.
"""

from dataclasses import dataclass

import jax

from fornax.kernels._stack import LayerStack

__all__ = ["GroupedWeight"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupedWeight(LayerStack):
    """A stack of matrices [L, E, K, N] for `kernels.grouped_matmul` and `kernels.fused_experts`.

    A slice of the array would be copied with all groups that have no rows.
    """
