"""Adapters while serving: read in PEFT's format, loaded, unloaded, put on the device when needed.

Legend: R rank, K inputs (flattened), N outputs (flattened).
"""

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.adapters.peft_file import read_peft
from fornax.config.errors import ConfigError, EngineError
from fornax.llm.lora import LoRAStack, attach, write_slot
from fornax.llm.weights import Weights
from fornax.mesh import named_sharding
from fornax.models import Decoder, abstract_decoder
from fornax.models.families.convert import family_for
from fornax.models.layout import Slot, TensorLayout, flat_variables, plan_layout

__all__ = ["Adapter", "Adapters", "Pair", "Place", "describe_adapters", "read_adapter"]

_REFUSED = {"use_dora": "merge it into the model and serve that, or train plain LoRA"}
"""What slots cannot hold: a DoRA's magnitudes belong to the base's weights."""


Place = tuple[int, ...]
"""Where a projection is in a stack of them: its layer, and its expert where it is one's."""


@dataclass(frozen=True)
class Pair:
    """An adapter's matrices of one projection in one layer, or of one expert's, in our layout."""

    down_KR: np.ndarray
    up_RN: np.ndarray
    """Scaled."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in the host's memory."""

    name: str
    path: str
    rank: int
    """The largest of its matrices."""
    pairs: Mapping[tuple[str, Place], Pair]
    """By parameter, such as layers/attention/q/kernel, and place in its stack."""


def read_adapter(
    name: str, path: str | Path, layout: list[TensorLayout], *, max_rank: int
) -> Adapter:
    """Read and check an adapter.

    Args:
        name: what requests will call it.
        path: its folder.
        layout: of the model's tensors.
        max_rank: that a slot has room for.

    Raises:
        EngineError: a kind of adapter that is not supported, another model's, or too large a rank.
        CheckpointError: files that are missing or damaged.
    """
    try:
        stored = read_peft(path, layout, refused=_REFUSED)
    except ConfigError as error:
        raise EngineError(str(error)) from error
    known = {tensor.name.removesuffix(".weight"): tensor for tensor in layout}
    pairs: dict[tuple[str, Place], Pair] = {}
    largest = 0
    for module, found in stored.modules.items():
        largest = max(largest, rank := len(found.down_RK))
        if rank > max_rank:
            raise EngineError(
                f"{stored.folder}: {module} has rank {rank}; the engine's max_lora_rank is "
                f"{max_rank}, raise it"
            )
        for block in known[module].blocks:
            rows = found.up_NR[block.start : block.stop]
            pairs[block.slot.path, block.slot.index] = Pair(found.down_RK.T, found.scale * rows.T)
    return Adapter(name, str(path), largest, pairs)


class Adapters:
    """A model's adapters: any number in the host's memory, `slots` of them on the device.

    Only `read` may be called, and `paths` be read, from another thread than the engine's.
    """

    def __init__(self, weights: Weights, *, slots: int, rank: int) -> None:
        """Make room on the device."""
        self._layout = _layout(weights)
        self._rank = rank
        self.paths: Mapping[str, str] = {}
        """Folders by name: replaced when adapters change, never changed."""
        self._adapters: dict[str, Adapter] = {}
        self._salts: dict[str, bytes] = {}
        self._loads = itertools.count()
        # Least recently used first.
        self._slots: dict[str, int] = {}
        self._free = list(range(slots))
        self._stacks = jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding),
            describe_adapters(weights, slots, rank),
        )
        for path in self._stacks:  # compiles the write of each shape before it is needed
            self._write(path, {}, 0)

    def salt(self, name: str) -> bytes:
        """What tells pages computed with this adapter, as loaded now, from all others.

        Raises:
            EngineError: there is no adapter of this name.
        """
        self._known(name)
        return self._salts[name]

    def read(self, name: str, path: str | Path) -> Adapter:
        """Read an adapter from its folder, for `add`.

        Raises:
            CheckpointError, EngineError: it cannot be read, or does not fit the model.
        """
        return read_adapter(name, path, self._layout, max_rank=self._rank)

    def add(self, adapter: Adapter) -> None:
        """Take an adapter in.

        Raises:
            EngineError: there is one of this name.
        """
        if adapter.name in self._adapters:
            raise EngineError(f"adapter {adapter.name!r} is loaded already; unload it first")
        self._adapters[adapter.name] = adapter
        self._salts[adapter.name] = f"{adapter.name}\0{next(self._loads)}".encode()
        self.paths = {**self.paths, adapter.name: adapter.path}

    def remove(self, name: str) -> None:
        """Forget an adapter that no sequence uses any more.

        Raises:
            EngineError: there is no adapter of this name.
        """
        self._known(name)
        del self._adapters[name], self._salts[name]
        self.paths = {other: path for other, path in self.paths.items() if other != name}
        if name in self._slots:
            self._free.append(self._slots.pop(name))

    def place(self, names: Collection[str]) -> bool:
        """Bring a step's adapters to the device, in place of those used least recently.

        Returns:
            Whether something was written, so that `attach` must be called again.

        Raises:
            EngineError: an unknown name, or more names than slots.
        """
        written = False
        for name in names:
            adapter = self._known(name)
            slot = self._slots.pop(name, None)
            if slot is None:
                slot = self._vacant(names)
                for path in self._stacks:
                    self._write(path, _layers(adapter, path), slot)
                written = True
            self._slots[name] = slot
        return written

    def slot(self, name: str) -> int:
        """Where `place` put an adapter."""
        return self._slots[name]

    def attach(self, state: nnx.State) -> nnx.State:
        """A model's parameters with the adapters around them; `lora.bind` says whose are used."""
        return attach(state, self._stacks, self._rank)

    def _known(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise EngineError(
                f"there is no adapter {name!r}; loaded are {', '.join(self._adapters) or 'none'}"
            )
        return self._adapters[name]

    def _vacant(self, needed: Collection[str]) -> int:
        if self._free:
            return self._free.pop()
        oldest = next((name for name in self._slots if name not in needed), None)
        if oldest is None:
            raise EngineError(
                f"a step needs {len(needed)} adapters and the device has room for "
                f"{len(self._slots)}; raise max_loras"
            )
        return self._slots.pop(oldest)

    def _write(self, path: str, pairs: Mapping[Place, Pair], slot: int) -> None:
        stack = self._stacks[path]
        *stacked, width, _ = stack.down_LKP.shape
        down_LKR = np.zeros((*stacked, width, self._rank), np.float32)
        up_LRN = np.zeros((*stacked, self._rank, stack.up_LPN.shape[-1]), np.float32)
        for place, pair in pairs.items():
            rank = pair.down_KR.shape[1]
            down_LKR[place][:, :rank] = pair.down_KR
            up_LRN[place][:rank] = pair.up_RN
        written = write_slot(stack, np.int32(slot), down_LKR, up_LRN)
        self._stacks[path] = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), written, stack
        )


def describe_adapters(weights: Weights, slots: int, rank: int) -> dict[str, LoRAStack]:
    """The shapes of what `Adapters` keeps, by path of the kernel.

    On a mesh those of experts are divided as the experts are; all others lie on every device.
    """
    model = _abstract(weights)
    parts: dict[str, list[Slot]] = {}
    for tensor in _layout(weights):
        for block in tensor.blocks:
            if block.slot.num_inputs and block.slot.layer is not None:
                parts.setdefault(block.slot.path, []).append(block.slot)
    found = {}
    for path, variable in flat_variables(model).items():
        if path not in parts:
            continue
        one, layers = parts[path][0], variable.shape[0]
        width = math.prod(one.shape[: one.num_inputs])
        outputs = math.prod(one.shape[one.num_inputs :])
        stacked, axes_down, axes_up = (layers,), (), ()
        if one.expert is not None:
            stacked = variable.shape[:2]
            *above, inputs, last = variable.get_metadata()["axes"]
            axes_down, axes_up = (*above, inputs, None), (*above, None, last)
        found[path] = LoRAStack(
            down_LKP=_described(weights, (*stacked, width, slots * rank), axes_down),
            up_LPN=_described(weights, (*stacked, slots * rank, outputs), axes_up),
        )
    return found


def _described(weights: Weights, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
    where, place = weights.placement, None
    if where.mesh is not None:
        place = named_sharding(where.mesh, axes, where.rules)
    return jax.ShapeDtypeStruct(shape, where.compute_dtype, sharding=place)


def _abstract(weights: Weights) -> Decoder:
    return abstract_decoder(weights.config, dtype=weights.dtype)


def _layout(weights: Weights) -> list[TensorLayout]:
    return plan_layout(_abstract(weights), family_for(weights.config).names)


def _layers(adapter: Adapter, path: str) -> dict[Place, Pair]:
    return {place: pair for (at, place), pair in adapter.pairs.items() if at == path}
