"""How our parameters are laid out as Hugging Face tensors: names, row blocks, transposes.

A projection's kernel [*inputs, *outputs] is their matrix [outputs, inputs]; a table, and a tensor
of all experts, is as it is; a convolution's kernel [*channels, width] is [channels, 1, width];
everything else is flattened. A layer's tensors lie one after another in our stack.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.decoder import Decoder
from fornax.models.families.family import ExpertsTensor, GroupedRows, MTPFiles, TensorName

__all__ = [
    "Block",
    "Slot",
    "TensorLayout",
    "by_expert",
    "flat_variables",
    "num_inputs",
    "plan_copies",
    "plan_layout",
]


@dataclass(frozen=True)
class Slot:
    """One of our parameters, or one layer of it."""

    path: str
    """Its path in the model, such as layers/attention/q/kernel."""
    layer: int | None
    """Its index in the stack; None for what is not stacked."""
    shape: tuple[int, ...]
    """Shape without the axes of layers and experts."""
    num_inputs: int
    """Leading axes of a kernel that are summed over; 0 for what is not a kernel."""
    expert: int | None = None
    """Which expert's it is, where each has a tensor of its own."""
    as_is: bool = False
    """Whether the file has it in our order of axes."""
    transposed: bool = False
    """Whether what is as it is has its last two axes exchanged."""
    depthwise: bool = False
    """Whether it is the kernel of a convolution of each channel by itself."""

    @property
    def of_all_experts(self) -> bool:
        """Whether it is the kernel of all experts, in one tensor."""
        return self.as_is and self.path.endswith("/kernel")

    @property
    def index(self) -> tuple[int, ...]:
        """Where it lies in the parameter: layer and expert, as far as it is one's."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        if self.num_inputs:
            split = self.num_inputs
            return (math.prod(self.shape[split:]), math.prod(self.shape[:split]))
        if self.depthwise:
            return (math.prod(self.shape[:-1]), 1, self.shape[-1])
        if self.transposed:
            return (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self.shape if self.as_is else (math.prod(self.shape),)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Our layout of a stored tensor, as a view."""
        if self.transposed:
            return tensor.swapaxes(-1, -2)
        if not self.num_inputs:
            return tensor.reshape(self.shape)
        inputs, outputs = self.shape[: self.num_inputs], self.shape[self.num_inputs :]
        order = len(outputs)
        split = tensor.reshape(*outputs, *inputs)
        return split.transpose(*range(order, split.ndim), *range(order))

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        """The stored layout of our parameter."""
        if self.transposed:
            return np.ascontiguousarray(value.swapaxes(-1, -2))
        if not self.num_inputs:
            return np.ascontiguousarray(value.reshape(self.stored_shape))
        rows, columns = self.stored_shape
        return np.ascontiguousarray(value.reshape(columns, rows).T)


@dataclass(frozen=True)
class Block:
    """Which of a stored tensor's rows, or places on another axis, one of our parameters takes."""

    start: int
    stop: int
    slot: Slot
    axis: int = 0
    step: int = 1
    groups: int = 1
    """Runs of rows that the tensor is divided into; `start` and `stop` are rows of each of them."""

    def cut(self, stored: np.ndarray) -> np.ndarray:
        """What it takes of the stored tensor; a view, unless of several groups."""
        taken = self._by_group(stored)[self._index]
        return taken if self.groups == 1 else taken.reshape(-1, *stored.shape[1:])

    def cut_experts(self, stored: np.ndarray) -> np.ndarray:
        """What it takes of a stored tensor of all experts' kernels: a view [E, outputs, inputs]."""
        taken = self.cut(stored)
        return taken if self.slot.transposed else taken.swapaxes(-1, -2)

    def put(self, stored: np.ndarray, part: np.ndarray) -> None:
        """Write what it takes into the stored tensor, in place."""
        taken = self._by_group(stored)[self._index]
        taken[...] = part.reshape(taken.shape)

    def _by_group(self, stored: np.ndarray) -> np.ndarray:
        if self.groups == 1:
            return stored
        return stored.reshape(self.groups, -1, *stored.shape[1:])

    @property
    def _index(self) -> tuple[slice, ...]:
        axis = self.axis + (self.groups > 1)
        return (*[slice(None)] * axis, slice(self.start, self.stop, self.step))


@dataclass(frozen=True)
class TensorLayout:
    """A stored tensor: its name, its shape, and what its rows become."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def plan_layout(model: Decoder, names: Mapping[str, TensorName]) -> list[TensorLayout]:
    """Every stored tensor of a model, in the order of its layers.

    Args:
      model: a decoder; abstract is enough.
      names: a family's names.

    Raises:
      ConfigError: when the model has a parameter without a name in the family, as after a
        submodule was swapped.
    """
    slots: dict[tuple[int, str], list[Slot]] = {}
    interleaved: set[str] = set()
    grouped: set[str] = set()
    variables = flat_variables(model)
    unnamed = [path for path in variables if path not in names]
    if unnamed:
        raise ConfigError(
            f"{', '.join(unnamed)} has no name in the Hugging Face family; only the family's own "
            "modules can be saved as one"
        )
    numbers = model.config.part_layers()
    for path in (path for path in names if path in variables):
        given = names[path]
        pattern = given if isinstance(given, str) else given.name
        for slot in _slots(model, path, variables[path], given):
            if slot.layer is None:
                layer = -1
            elif path.startswith("mtp/"):
                layer = model.config.num_layers + slot.layer
            else:
                layer = numbers[path.split("/")[1]][slot.layer]
            name = pattern.format(layer=layer, module=slot.layer, expert=slot.expert)
            slots.setdefault((layer, name), []).append(slot)
            if isinstance(given, ExpertsTensor) and given.interleaved:
                interleaved.add(name)
            if isinstance(given, GroupedRows):
                grouped.add(name)
    in_order = sorted(slots.items(), key=lambda item: item[0][0])
    return [
        _fuse(name, parts, take_turns=name in interleaved, by_head=name in grouped)
        for (_, name), parts in in_order
    ]


def by_expert(tensor: TensorLayout) -> list[TensorLayout]:
    """The matrices that quantized files have in place of a kernel of all experts: one [outputs,
    inputs] for each part of each expert, named as linear layers are, such as experts.3.gate_proj.

    Returns:
      The parts in order, the experts of each in order; none when the tensor is no such kernel.
    """
    found = []
    prefix = tensor.name.rpartition(".")[0]
    for slot in (block.slot for block in tensor.blocks if block.slot.of_all_experts):
        part = slot.path.split("/")[-2]
        for expert in range(slot.shape[0]):
            own = Slot(slot.path, slot.layer, slot.shape[1:], 1, expert)
            rows, _ = own.stored_shape
            name = f"{prefix}.{expert}.{part}_proj.weight"
            found.append(TensorLayout(name, own.stored_shape, (Block(0, rows, own),)))
    return found


def plan_copies(layout: list[TensorLayout], config: DecoderConfig, mtp: MTPFiles) -> dict[str, str]:
    """The copies of other tensors that files keep with modules that predict further tokens.

    Args:
      layout: of the model, from `plan_layout`.
      config: the model's.
      mtp: how its family keeps modules.

    Returns:
      Name of each copy to the name of the tensor in `layout` that it is a copy of.
    """
    by_path = {tensor.blocks[0].slot.path: tensor.name for tensor in layout}
    table = by_path["embed/embedding"]  # also the output projection's, where they are tied
    return {
        name.format(layer=config.num_layers + module, module=module): by_path.get(path, table)
        for module in range(config.num_mtp_modules)
        for path, name in mtp.copies.items()
    }


def _slots(model: nnx.Module, path: str, variable: Any, given: TensorName) -> Iterator[Slot]:
    """The parts of a parameter that are tensors of their own, or blocks of one."""
    axes, shape = variable.get_metadata()["axes"], variable.shape
    stacked = axes[:1] == ("layers",)
    by_expert = isinstance(given, str) and "{expert}" in given
    whole = isinstance(given, ExpertsTensor)
    layers = range(shape[0]) if stacked else (None,)
    experts = range(shape[stacked]) if by_expert else (None,)
    shape = shape[stacked + by_expert :]
    as_is = whole or path.endswith("/embedding")
    inputs = 0 if as_is else num_inputs(model, path)
    form = {
        "as_is": as_is,
        "transposed": isinstance(given, ExpertsTensor) and given.transposed,
        "depthwise": axes[-1] == "conv",
    }
    for layer, expert in itertools.product(layers, experts):
        yield Slot(path, layer, shape, inputs, expert, **form)


def flat_variables(model: nnx.Module) -> dict[str, Any]:
    """The model's variables by path, such as layers/attention/q/kernel."""
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    return {"/".join(map(str, path)): variable for path, variable in flat.items()}


def num_inputs(model: nnx.Module, path: str) -> int:
    """Leading axes of a kernel that are summed over; 0 for what is not a kernel of a linear
    layer."""
    *owners, leaf = path.split("/")
    owner = functools.reduce(getattr, owners, model)
    return getattr(owner, "num_inputs", 0) if leaf == "kernel" else 0


def _fuse(name: str, slots: list[Slot], *, take_turns: bool, by_head: bool) -> TensorLayout:
    """The tensor of several slots: by rows, those of each head together, or by the axis of all
    experts' outputs."""
    shape = slots[0].stored_shape
    axis = len(shape) - 1 - slots[0].transposed if slots[0].as_is else 0
    groups = slots[0].shape[slots[0].num_inputs] if by_head else 1
    ends = list(itertools.accumulate(slot.stored_shape[axis] // groups for slot in slots))
    if take_turns:
        blocks = [Block(n, ends[-1], slot, axis, len(slots)) for n, slot in enumerate(slots)]
    else:
        starts = [0, *ends]
        blocks = [
            Block(starts[n], ends[n], slot, axis, groups=groups) for n, slot in enumerate(slots)
        ]
    rows = ends[-1] * groups
    return TensorLayout(name, (*shape[:axis], rows, *shape[axis + 1 :]), tuple(blocks))
