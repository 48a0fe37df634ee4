"""Export: a JAX function and its weights, sealed in a directory that needs none of their code.

`save`, `load` and `open_bundle` bring jax with them, so they are imported when first asked for:
signatures and buckets need numpy only.
"""

from typing import TYPE_CHECKING, Any

from fornax.export.spec import Signature, Spec, TensorSpec

if TYPE_CHECKING:
    from fornax.export.load import Bundle, Loaded, load, open_bundle
    from fornax.export.placement import OneDevice, Placement
    from fornax.export.program import Memory, Program
    from fornax.export.save import save
    from fornax.export.weights import Weights

__all__ = [
    "Bundle",
    "Loaded",
    "Memory",
    "OneDevice",
    "Placement",
    "Program",
    "Signature",
    "Spec",
    "TensorSpec",
    "Weights",
    "load",
    "open_bundle",
    "save",
]

_ROOMS = {
    "Bundle": "load",
    "Loaded": "load",
    "Memory": "program",
    "OneDevice": "placement",
    "Placement": "placement",
    "Program": "program",
    "Weights": "weights",
    "load": "load",
    "open_bundle": "load",
    "save": "save",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        import importlib

        return getattr(importlib.import_module(f"fornax.export.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
