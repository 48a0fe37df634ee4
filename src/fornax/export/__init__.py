"""Export: a JAX function and its weights, sealed in a directory that needs none of their code.

`save`, `load` and `open_bundle` bring jax with them, so they are imported when first asked for:
signatures and buckets need numpy only.
"""

from typing import TYPE_CHECKING, Any

from fornax.export.spec import Signature, Spec, TensorSpec

if TYPE_CHECKING:
    from fornax.export.bundle import Bundle, open_bundle
    from fornax.export.golden import GoldenArrays, Report
    from fornax.export.loaded import Loaded, load
    from fornax.export.manifest import Manifest, Tolerance
    from fornax.export.placement import OneDevice, OnMesh, Placement
    from fornax.export.program import Memory, Program
    from fornax.export.safetensors_map import Tensor, read_safetensors
    from fornax.export.seal import save
    from fornax.export.weights import Weights

__all__ = [
    "Bundle",
    "GoldenArrays",
    "Loaded",
    "Manifest",
    "Memory",
    "OnMesh",
    "OneDevice",
    "Placement",
    "Program",
    "Report",
    "Signature",
    "Spec",
    "Tensor",
    "TensorSpec",
    "Tolerance",
    "Weights",
    "load",
    "open_bundle",
    "read_safetensors",
    "save",
]

_ROOMS = {
    "Bundle": "bundle",
    "GoldenArrays": "golden",
    "Loaded": "loaded",
    "Manifest": "manifest",
    "Memory": "program",
    "OnMesh": "placement",
    "OneDevice": "placement",
    "Placement": "placement",
    "Program": "program",
    "Report": "golden",
    "Tensor": "safetensors_map",
    "Tolerance": "manifest",
    "Weights": "weights",
    "load": "loaded",
    "open_bundle": "bundle",
    "read_safetensors": "safetensors_map",
    "save": "seal",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        import importlib

        return getattr(importlib.import_module(f"fornax.export.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
