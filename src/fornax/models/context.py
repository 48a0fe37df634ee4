"""What all layers of one forward pass share."""

from dataclasses import dataclass
from typing import Literal

import jax

from fornax.models.rope import Rotation

__all__ = ["LayerContext"]


@dataclass(frozen=True)
class LayerContext:
    """What all layers of one forward pass share."""

    positions_BT: jax.Array
    """int32 position of each query within its document."""
    segment_ids_BT: jax.Array | None
    """int32 document of each query, 0 for padding; None when all is one document."""
    rotations: dict[str, Rotation]
    """Cosines and sines by `LayerKind.rope`."""
    seen_BT: jax.Array | None = None
    """int32, 0 for keys that no query sees, though padding queries like others; None: as
    `segment_ids_BT` says. Of one document, in a pass without a cache."""
    consecutive: bool = False
    """Whether positions count up by one with the index inside each document."""
    balanced: bool = False
    """Whether tokens lie in balanced order over the devices that divide the length."""
    layer_inputs_LBTP: jax.Array | None = None
    """Further inputs of all layers, P wide each; None where there are none."""
    layer_input_BTP: jax.Array | None = None
    """That of the current layer."""
    routed_experts_LBTk: jax.Array | None = None
    """Integers: the experts that tokens take in each layer with experts, below 0 where the router
    chooses; None: it chooses for all."""
    routed_experts_BTk: jax.Array | None = None
    """Those of the current layer."""
    returns_experts: bool = False
    """Whether `Routing` is to have the experts that each token took."""
    drops_tokens: bool = False
    """Whether experts have room for `ExpertsConfig.capacity_factor`, and not for all tokens."""
    exchange: Literal["auto", "all_gather", "heads", "ring"] = "auto"
    """How devices that divide the length attend; see `DecoderConfig.context_exchange`."""
    implementation: str | None = None
    """Attention implementation to force; None lets `kernels.attention` choose."""
