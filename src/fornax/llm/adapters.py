"""Adapters while serving: read in PEFT's format, loaded, unloaded, put on the device when needed.

Legend: R rank, K inputs (flattened), N outputs (flattened).
"""

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fornax.adapters.peft_file import read_peft
from fornax.config.errors import ConfigError, EngineError
from fornax.llm.lora import LoRAStack, attach, write_slot
from fornax.llm.weights import Weights
from fornax.models import abstract_decoder
from fornax.models.families.convert import family_for
from fornax.models.layout import TensorLayout, plan_layout

__all__ = ["Adapter", "Adapters", "Pair", "describe_adapters", "read_adapter"]

_REFUSED = {"use_dora": "merge it into the model and serve that, or train plain LoRA"}
"""What slots cannot hold: a DoRA's magnitudes belong to the base's weights."""


@dataclass(frozen=True)
class Pair:
    """An adapter's matrices of one projection in one layer, in our layout."""

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
    pairs: Mapping[tuple[str, int], Pair]
    """By parameter, such as layers/attention/q/kernel, and layer."""


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
    pairs: dict[tuple[str, int], Pair] = {}
    largest = 0
    for module, found in stored.modules.items():
        largest = max(largest, rank := len(found.down_RK))
        if rank > max_rank:
            raise EngineError(
                f"{stored.folder}: {module} has rank {rank}; the engine's max_lora_rank is "
                f"{max_rank}, raise it"
            )
        for block in known[module].blocks:
            if block.slot.expert is not None:
                raise EngineError(
                    f"{stored.folder}: {module} is one expert's, and slots hold adapters of what "
                    "all tokens pass only; merge it into the model and serve that"
                )
            rows = found.up_NR[block.start : block.stop]
            key = (block.slot.path, block.slot.layer or 0)
            pairs[key] = Pair(found.down_RK.T, found.scale * rows.T)
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
        self._everywhere = None
        if weights.placement.mesh is not None:
            self._everywhere = NamedSharding(weights.placement.mesh, PartitionSpec())
        self._stacks = jax.device_put(_empty(weights, slots, rank), self._everywhere)
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
            Whether something was written, so that `attach` must be called anew.

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

    def _write(self, path: str, pairs: Mapping[int, Pair], slot: int) -> None:
        stack = self._stacks[path]
        layers, width, _ = stack.down_LKP.shape
        down_LKR = np.zeros((layers, width, self._rank), np.float32)
        up_LRN = np.zeros((layers, self._rank, stack.up_LPN.shape[-1]), np.float32)
        for layer, pair in pairs.items():
            rank = pair.down_KR.shape[1]
            down_LKR[layer, :, :rank] = pair.down_KR
            up_LRN[layer, :rank] = pair.up_RN
        self._stacks[path] = write_slot(stack, np.int32(slot), down_LKR, up_LRN)


def describe_adapters(weights: Weights, slots: int, rank: int) -> dict[str, LoRAStack]:
    """The shapes of what `Adapters` keeps on every device."""
    return jax.eval_shape(lambda: _empty(weights, slots, rank))


def _empty(weights: Weights, slots: int, rank: int) -> dict[str, LoRAStack]:
    """Room for `slots` adapters, by path of the kernel."""
    layout = _layout(weights)
    places = [block.slot for tensor in layout for block in tensor.blocks]
    found = {}
    for slot in places:
        if slot.num_inputs and slot.layer == 0 and slot.expert is None:
            layers = sum(other.path == slot.path for other in places)
            width = math.prod(slot.shape[: slot.num_inputs])
            outputs = math.prod(slot.shape[slot.num_inputs :])
            dtype = weights.placement.compute_dtype
            found[slot.path] = LoRAStack(
                down_LKP=jnp.zeros((layers, width, slots * rank), dtype),
                up_LPN=jnp.zeros((layers, slots * rank, outputs), dtype),
            )
    return found


def _layout(weights: Weights) -> list[TensorLayout]:
    model = abstract_decoder(weights.config, dtype=weights.dtype)
    return plan_layout(model, family_for(weights.config).names)


def _layers(adapter: Adapter, path: str) -> dict[int, Pair]:
    return {layer: pair for (at, layer), pair in adapter.pairs.items() if at == path}
