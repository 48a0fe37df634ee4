"""How our parameters are laid out as Hugging Face tensors: names, row blocks, transposes.

A projection's kernel [*inputs, *outputs] is their matrix [outputs, inputs]; a table is as it is;
everything else is flattened. A layer's tensors lie behind one another in our stack.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError

__all__ = ["Block", "Slot", "TensorLayout", "flat_variables", "plan_layout"]


@dataclass(frozen=True)
class Slot:
    """One of our parameters, or one layer of it."""

    path: str
    """Its path in the model, such as layers/attention/q/kernel."""
    layer: int | None
    shape: tuple[int, ...]
    """Shape without the layers axis."""
    num_inputs: int
    """Leading axes of a kernel that are summed over; 0 for what is no kernel."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        if self.num_inputs:
            split = self.num_inputs
            return (math.prod(self.shape[split:]), math.prod(self.shape[:split]))
        return self.shape if self.path.endswith("/embedding") else (math.prod(self.shape),)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Our layout of a stored tensor, as a view."""
        if not self.num_inputs:
            return tensor.reshape(self.shape)
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        order = len(outputs)
        split = tensor.reshape(*outputs, *inputs)
        return split.transpose(*range(order, split.ndim), *range(order))

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        """The stored layout of our parameter."""
        if not self.num_inputs:
            return np.ascontiguousarray(value.reshape(self.stored_shape))
        rows, columns = self.stored_shape
        return np.ascontiguousarray(value.reshape(columns, rows).T)


@dataclass(frozen=True)
class Block:
    """The rows of a stored tensor that one of our parameters takes."""

    start: int
    stop: int
    slot: Slot


@dataclass(frozen=True)
class TensorLayout:
    """A stored tensor: its name, its shape, and what its rows become."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def plan_layout(model: nnx.Module, names: Mapping[str, str]) -> list[TensorLayout]:
    """Every stored tensor of a model, in the order of its layers.

    Args:
      model: a decoder; abstract is enough.
      names: a family's names.

    Raises:
      ConfigError: when the model has a parameter without a name in the family, as after a
        submodule was swapped.
    """
    slots: dict[tuple[int, str], list[Slot]] = {}
    variables = flat_variables(model)
    unnamed = [path for path in variables if path not in names]
    if unnamed:
        raise ConfigError(
            f"{', '.join(unnamed)} has no name in the Hugging Face family; only the family's own "
            "modules can be saved as one"
        )
    for path in (path for path in names if path in variables):
        variable = variables[path]
        stacked = variable.get_metadata()["axes"][:1] == ("layers",)
        shape = variable.shape[1:] if stacked else variable.shape
        num_inputs = _num_inputs(model, path)
        for layer in range(variable.shape[0]) if stacked else (None,):
            key = (-1 if layer is None else layer, names[path].format(layer=layer))
            slots.setdefault(key, []).append(Slot(path, layer, shape, num_inputs))
    in_order = sorted(slots.items(), key=lambda item: item[0][0])
    return [_fuse(name, parts) for (_, name), parts in in_order]


def flat_variables(model: nnx.Module) -> dict[str, Any]:
    """The model's variables by path, such as layers/attention/q/kernel."""
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    return {"/".join(map(str, path)): variable for path, variable in flat.items()}


def _num_inputs(model: nnx.Module, path: str) -> int:
    *owners, leaf = path.split("/")
    owner = functools.reduce(getattr, owners, model)
    return getattr(owner, "num_inputs", 0) if leaf == "kernel" else 0


def _fuse(name: str, slots: list[Slot]) -> TensorLayout:
    blocks, row = [], 0
    for slot in slots:
        stop = row + slot.stored_shape[0]
        blocks.append(Block(row, stop, slot))
        row = stop
    return TensorLayout(name, (row, *slots[0].stored_shape[1:]), tuple(blocks))
