"""What each remat policy keeps of a layer, by the names of `layer.py`."""

import functools
from dataclasses import dataclass

from fornax.models.remat import Remat

__all__ = ["Policy", "policy_of"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What stays for the backward pass."""

    keeps_all: bool = False
    """No rematerialisation: whatever the backward pass uses stays."""
    products: bool = False
    """Results of matrix products stay."""
    names: frozenset[str] = frozenset()
    """Values that stay by name."""
    host: frozenset[str] = frozenset()
    """Values that stay in the host's memory."""

    def keeps(self, name: str, kind: str) -> bool:
        """Whether a value of the layer stays, on the device or the host."""
        return (self.products and kind == "product") or name in self.names or name in self.host

    def offloads(self, name: str) -> bool:
        """Whether it stays in the host's memory."""
        return name in self.host


_ATTENTION = frozenset(("q", "k", "v", "o"))
_NAMES = {
    "layer_input": "x",
    "query": "q",
    "key": "k",
    "value": "v",
    "attention": "o",
    "attention_out": "o_product",
    "mlp_gate": "gate",
    "mlp_up": "up",
    "mlp_down": "down",
}
"""`fornax.models.REMAT_NAMES` to the values they name."""


@functools.cache
def policy_of(remat: Remat) -> Policy:
    """What a `Remat` keeps."""
    match remat.policy:
        case "none":
            return Policy(keeps_all=True)
        case "full":
            return Policy()
        case "dots":
            return Policy(products=True, names=_ATTENTION)
        case "dots_no_batch":
            return Policy(products=True)
        case "save_attention":
            return Policy(names=_ATTENTION)
        case "names":
            return Policy(
                names=frozenset(_NAMES[name] for name in remat.save),
                host=frozenset(_NAMES[name] for name in remat.offload),
            )
