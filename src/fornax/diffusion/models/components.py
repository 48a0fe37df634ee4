"""The table of components: by class name of diffusers or transformers, what it is here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from fornax.config.errors import ConfigError
from fornax.config.suggest import did_you_mean
from fornax.diffusion.models import autoencoders, files, text, transformer, unet
from fornax.diffusion.models.files import Component

__all__ = ["COMPONENTS", "component_of", "load_component", "save_component"]

COMPONENTS: Mapping[str, Component] = {
    one.class_name: one
    for one in (
        *autoencoders.COMPONENTS,
        *text.COMPONENTS,
        *transformer.COMPONENTS,
        *unet.COMPONENTS,
    )
}
"""What is known; a further kind of network adds its own here."""


def _named(name: str) -> Component:
    if name not in COMPONENTS:
        raise ConfigError(f"{name} is not known; {did_you_mean(name, sorted(COMPONENTS))}")
    return COMPONENTS[name]


def component_of(folder: str | Path) -> Component:
    """What a component's folder is of, by its config.json.

    Raises:
      CheckpointError: config.json is missing or names no class.
      ConfigError: a class that is not known.
    """
    return _named(files.read_class(folder))


def load_component(folder: str | Path, **options: Any) -> nnx.Module:
    """The module of a component's folder; options and errors are those of `files.load`."""
    return files.load(component_of(folder), folder, **options)


def save_component(module: nnx.Module, folder: str | Path, **options: Any) -> None:
    """Write a module as the class that its config names; options and errors are those of
    `files.save`.

    Args:
      module: with a config whose `class_name` is a key of `COMPONENTS`.
      folder: to make.
    """
    files.save(_named(module.config.class_name), module, folder, **options)  # pyrefly: ignore[missing-attribute]
