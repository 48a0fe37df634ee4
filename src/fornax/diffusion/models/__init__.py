"""Networks of diffusion models, by config, with diffusers' files in and out."""

from fornax.diffusion.models.components import (
    COMPONENTS,
    component_of,
    load_component,
    save_component,
)
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.files import Component, create
from fornax.diffusion.models.transformer import DiTConfig, Transformer, TransformerConfig

__all__ = [
    "COMPONENTS",
    "Component",
    "Condition",
    "DiTConfig",
    "Transformer",
    "TransformerConfig",
    "component_of",
    "create",
    "load_component",
    "save_component",
]
