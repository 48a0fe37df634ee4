"""Key maps: which tensor of a file each parameter is, as one table that serves both directions.

A table has a line for each module; what a module's parameters are called and how they are laid out
in files of torch follows from its kind. Legend: C channels in, N channels out.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import (
    Conv,
    Embedding,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from fornax.models.projection import Projection

__all__ = ["Key", "Slot", "Tensor", "parameters", "plan"]


@dataclass(frozen=True)
class Key:
    """One line of a key map: a module, or a parameter, and its name in the files.

    Several lines with one name are parts of one tensor, one after another in the table's order.
    """

    path: str
    """In our tree, such as `blocks/attention/q`."""
    name: str
    """In the files, such as `blocks.{}.attn.to_q`, without `.weight` and `.bias` for a module;
    `{}` stands for the number of a layer of a stack."""
    _: KW_ONLY
    layers: range | None = None
    """The numbers that stand for `{}`, in the stack's order; None for what is not stacked."""
    axis: int = 0
    """Along which axis of the tensor parts lie one after another. Along axis 1, the inputs, only
    one part has a bias."""
    order: tuple[int, ...] = ()
    """The tensor's rows are this many equal blocks, and our i-th is its `order[i]`-th."""
    leading: int = 0
    """Axes of size 1 before those that our parameter has."""
    trailing: int = 0
    """Axes of size 1 after them, as of a convolution whose window is one place."""
    patch: tuple[int, ...] = ()
    """Our inputs, or with `of_outputs` our outputs, are the places of a patch with its channels
    last; the tensor has the channels before the places."""
    of_outputs: bool = False
    unfolded: bool = False
    """Whether it is stored as a convolution's kernel, [N, C, *patch]."""
    as_is: bool = False
    """Whether the tensor has our axes, in our order."""


@dataclass(frozen=True)
class Slot:
    """One of our parameters, or one layer of it, as a tensor or a part of one."""

    path: str
    """Of the parameter, such as blocks/attention/q/kernel."""
    layer: int | None
    shape: tuple[int, ...]
    """Of the parameter, without the axis of layers."""
    inputs: int
    """Axes of a product's kernel that are summed over; 0 for what is no such kernel."""
    window: int
    """Axes of a convolution's window; 0 for what is not a convolution's kernel."""
    key: Key

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The part's shape in the file."""
        if self.window:
            *window, channels, outputs = self.shape
            core = (outputs, channels, *window)
        elif self.inputs:
            split = self.inputs
            core = (math.prod(self.shape[split:]), math.prod(self.shape[:split]))
            if self.key.unfolded:
                places = math.prod(self.key.patch)
                core = (core[0], core[1] // places, *self.key.patch)
        else:
            flat = self.path.endswith("/bias") and not self.key.as_is
            core = (math.prod(self.shape),) if flat else self.shape
        leading, trailing = self._units
        return (*(1,) * leading, *core, *(1,) * trailing)

    def from_stored(self, part: np.ndarray) -> np.ndarray:
        """Our layout of the stored part."""
        part = part.reshape(self._flat)
        if self.key.patch:
            part = self._channels_last(part)
        if self.key.order:
            part = self._blocks(part)[list(self.key.order)].reshape(part.shape)
        if self.window:
            return part.transpose(*range(2, part.ndim), 1, 0)
        if not self.inputs:
            return part.reshape(self.shape)
        return part.T.reshape(self.shape)

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        """The stored layout of our parameter."""
        if self.window:
            part = value.transpose(value.ndim - 1, value.ndim - 2, *range(value.ndim - 2))
        elif self.inputs:
            rows, columns = self._flat
            part = value.reshape(columns, rows).T
        else:
            part = value
        if self.key.order:
            back = np.argsort(self.key.order)
            part = self._blocks(part)[back].reshape(part.shape)
        if self.key.patch:
            part = self._channels_first(part)
        return np.ascontiguousarray(part).reshape(self.stored_shape)  # which may have no axes

    @property
    def _units(self) -> tuple[int, int]:
        """Axes of size 1 that are added; a module's bias has none."""
        if self.path.endswith("/bias") and self.path != self.key.path:
            return 0, 0
        return self.key.leading, self.key.trailing

    @property
    def _flat(self) -> tuple[int, ...]:
        """The stored shape without axes that are added, a product's kernel as a matrix."""
        shape, (leading, trailing) = self.stored_shape, self._units
        shape = shape[leading : len(shape) - trailing]
        return (shape[0], math.prod(shape[1:])) if self.inputs else shape

    def _channels_last(self, part: np.ndarray) -> np.ndarray:
        """Rows, or columns, whose channels come first with the channels last."""
        places, axis = math.prod(self.key.patch), 0 if self.key.of_outputs else part.ndim - 1
        if not self.key.of_outputs and part.ndim == 1:  # a bias is of the outputs
            return part
        split = part.reshape(*part.shape[:axis], -1, places, *part.shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(part.shape)

    def _channels_first(self, part: np.ndarray) -> np.ndarray:
        places, axis = math.prod(self.key.patch), 0 if self.key.of_outputs else part.ndim - 1
        if not self.key.of_outputs and part.ndim == 1:
            return part
        split = part.reshape(*part.shape[:axis], places, -1, *part.shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(part.shape)

    def _blocks(self, part: np.ndarray) -> np.ndarray:
        return part.reshape(len(self.key.order), -1, *part.shape[1:])


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: its name, and our parameters that it consists of."""

    name: str
    slots: tuple[Slot, ...]

    @property
    def axis(self) -> int:
        """Along which its parts lie one after another."""
        return self.slots[0].key.axis

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        shape = list(self.slots[0].stored_shape)
        if len(self.slots) > 1:
            shape[self.axis] = sum(slot.stored_shape[self.axis] for slot in self.slots)
        return tuple(shape)

    def parts(self, stored: np.ndarray) -> list[np.ndarray]:
        """The part of each slot, in our layout."""
        if len(self.slots) == 1:
            return [self.slots[0].from_stored(stored)]
        ends = list(itertools.accumulate(slot.stored_shape[self.axis] for slot in self.slots))
        pieces = np.split(stored, ends[:-1], self.axis)
        return [slot.from_stored(piece) for slot, piece in zip(self.slots, pieces, strict=True)]

    def whole(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor, of the slots' values in our layout."""
        pieces = [slot.to_stored(value) for slot, value in zip(self.slots, values, strict=True)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, self.axis)


def parameters(module: nnx.Module) -> dict[str, Any]:
    """A module's variables by path, such as blocks/attention/q/kernel."""
    flat = dict(nnx.to_flat_state(nnx.state(module)))
    return {"/".join(map(str, path)): variable for path, variable in flat.items()}


def plan(module: nnx.Module, keys: Iterable[Key]) -> list[Tensor]:
    """Every tensor of a module's files, in the order of the table.

    Args:
      module: abstract is enough.
      keys: the table; a line of a module, or a parameter, that this module has not is passed over.

    Raises:
      ConfigError: a parameter without a line, with two, or a line whose layers are not those of
        the stack; parts along the inputs that both have a bias.
    """
    variables = parameters(module)
    found: dict[str, list[Slot]] = {}
    taken: set[str] = set()
    for key in keys:
        for path, suffix in _leaves(module, key.path, variables):
            layers = (None,) if key.layers is None else key.layers
            shape = tuple(variables[path].get_value().shape)
            if key.layers is not None and shape[0] != len(key.layers):
                raise ConfigError(
                    f"{path} is a stack of {shape[0]}, and the key map names {len(key.layers)} "
                    f"layers of {key.name}; give it range({shape[0]})"
                )
            if path in taken:
                raise ConfigError(f"{path} is in the key map twice; leave one line")
            taken.add(path)
            for place, number in enumerate(layers):
                name = key.name if number is None else key.name.format(number)
                layer = None if number is None else place
                slot = _slot(module, path, layer, shape if number is None else shape[1:], key)
                found.setdefault(name + suffix, []).append(slot)
    missing = [path for path in variables if path not in taken]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} has no line in the key map; only what its files' format can "
            "express is saved in it"
        )
    for name, slots in found.items():
        if len(slots) > 1 and slots[0].key.axis >= len(slots[0].stored_shape):
            raise ConfigError(
                f"{' and '.join(slot.path for slot in slots)} are both {name}, which cannot be "
                f"divided along axis {slots[0].key.axis}; leave the bias to one of the modules"
            )
    return [Tensor(name, tuple(slots)) for name, slots in found.items()]


_NAMES = {"kernel": ".weight", "scale": ".weight", "table": ".weight", "bias": ".bias"}
"""A parameter of a module, and the end of its tensor's name."""


def _leaves(module: nnx.Module, path: str, variables: dict[str, Any]) -> list[tuple[str, str]]:
    """The parameters of a line that there are, with the ends of their names."""
    if path in variables:
        return [(path, "")]
    return [
        (f"{path}/{leaf}", suffix)
        for leaf, suffix in _NAMES.items()
        if f"{path}/{leaf}" in variables
    ]


def _slot(
    module: nnx.Module, path: str, layer: int | None, shape: tuple[int, ...], key: Key
) -> Slot:
    *owners, leaf = path.split("/")
    owner = functools.reduce(_child, owners, module)
    inputs = window = 0
    if key.as_is:
        return Slot(path, layer, shape, inputs, window, key)
    if leaf == "kernel" and isinstance(owner, Conv):
        window = len(shape) - 2
    elif leaf == "kernel" and isinstance(owner, Projection):
        inputs = owner.num_inputs
    elif key.path != path and not isinstance(
        owner, Projection | Conv | GroupNorm | LayerNorm | RMSNorm | Embedding
    ):
        raise ConfigError(
            f"{path} is of a {type(owner).__name__}, whose layout in files is not known; give the "
            "key map a line for the parameter itself"
        )
    return Slot(path, layer, shape, inputs, window, key)


def _child(module: Any, name: str) -> Any:
    return module[int(name)] if name.isdigit() else getattr(module, name)
