"""An engine for a topology: how many devices share it, its weights, cache and steps as shapes.

Everything here is the engine's own code (`fornax.llm`) called with devices that are only counted.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import DraftModel, EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.limits import Limits, draft_limits
from fornax.llm.memory import Account, account_of, fit_limits
from fornax.llm.programs import Arrays, Sizes, describe_arrays
from fornax.llm.weights import Weights, describe_weights
from fornax.models import DecoderConfig
from fornax.plan.serving.model import ServedModel, read_model
from fornax.plan.topology import Topology


@dataclass(frozen=True, kw_only=True)
class ServingConfig(EngineConfig):
    """An engine's limits and choices, its tensor parallelism possibly left to the plan."""

    tensor_parallel_size: int = 0
    """Devices that each layer is divided over; 0: as many of the topology's as the model divides
    over (one on CPU)."""

    def __post_init__(self) -> None:
        """Check what the engine checks."""
        if self.tensor_parallel_size:
            super().__post_init__()
        else:
            self.engine(1)

    def engine(self, size: int) -> EngineConfig:
        """The engine's own config, with `size` where the tensor parallelism is left open."""
        fields = dataclasses.fields(EngineConfig)
        values = {field.name: getattr(self, field.name) for field in fields}
        values["tensor_parallel_size"] = self.tensor_parallel_size or size
        return EngineConfig(**values)


@dataclass(frozen=True)
class Engine:
    """An engine as shapes."""

    model: ServedModel
    config: EngineConfig
    """With the tensor parallelism that was chosen."""
    topology: Topology
    target: DeviceSpec
    weights: Weights
    limits: Limits
    draft: Weights | None = None
    """The draft model's, as shapes."""

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes it compiles steps for."""
        return Sizes.of(self.config, self.weights, self.limits)

    @cached_property
    def arrays(self) -> Arrays:
        """What it keeps on its devices."""
        return describe_arrays(self.weights, self.limits, self.sizes)

    @cached_property
    def account(self) -> Account:
        """What one device holds."""
        return account_of(self.config, self.weights, self.limits, self.draft)

    @property
    def devices(self) -> int:
        """JAX devices that one engine takes."""
        return self.config.tensor_parallel_size

    @property
    def chips(self) -> float:
        """Chips that one engine takes."""
        return self.devices / self.topology.chip.devices

    @property
    def engines(self) -> int:
        """Engines that the topology has room for."""
        return self.topology.num_devices // self.devices

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each group on one device."""
        return tuple(size // self.devices for size in self.limits.page_bytes(self.model.config))

    @property
    def draft_page_bytes(self) -> int:
        """Bytes of a page of every group of the draft model's cache on one device, 0 without."""
        if self.draft is None:
            return 0
        small = self.draft.config
        return sum(draft_limits(self.limits, small).page_bytes(small)) // self.devices


def target_of(topology: Topology, devices: tuple[jax.Device, ...] = ()) -> DeviceSpec:
    """The engine's view of one slice or server of a topology.

    Args:
      topology: where it will run.
      devices: compile-only devices, in the process that compiles.
    """
    chip = topology.chip
    memory = None
    if chip.platform != "cpu":
        memory = int(chip.usable_bytes / chip.devices)
    return DeviceSpec(
        platform=chip.platform,
        num_devices=len(devices) or topology.num_devices,
        memory=memory,
        devices=devices,
    )


def parallel_sizes(model: DecoderConfig, topology: Topology) -> list[int]:
    """Tensor parallelisms to choose from, the best first: as many devices of one slice or server
    as divide the key/value heads too, then those that keep a head on several devices."""
    most = topology.num_devices // topology.slices
    if topology.chip.platform == "gpu":
        most = topology.shape[-1] * topology.chip.devices
    if topology.chip.platform == "cpu":
        return [1]  # packed weights and the native kernels are for one device
    sizes = [size for size in range(most, 0, -1) if divides(model, size)]
    return sorted(sizes, key=lambda size: model.kv_heads % size != 0)


def choose_tensor_parallel(
    model: ServedModel, config: Callable[[int], EngineConfig], topology: Topology
) -> EngineConfig:
    """The engine's config with the first parallelism with which a full sequence finds room."""
    sizes = parallel_sizes(model.config, topology)
    for size in sizes:
        try:
            describe_engine(model, config(size), topology)
        except EngineError:
            continue
        return config(size)
    return config(sizes[0])


def divides(model: DecoderConfig, size: int) -> bool:
    """Whether the engine can divide the model's layers over `size` devices."""
    numbers = [model.num_heads, *model.mlp_widths]
    if model.num_mtp_modules:
        numbers.append(2 * model.hidden_size)
    if model.linear is not None:
        numbers.append(model.linear.sharded_heads)
    whole = all(number % size == 0 for number in numbers)
    return whole and all(kv % size == 0 or size % kv == 0 for kv in _kv_heads(model))


def _kv_heads(model: DecoderConfig) -> set[int]:
    """Numbers of key/value heads that layers have."""
    return {model.kv_shape(kind)[0] for kind in model.layer_kinds()}


def describe_engine(
    model: ServedModel,
    config: EngineConfig,
    topology: Topology,
    target: DeviceSpec | None = None,
) -> Engine:
    """An engine for the topology, as shapes.

    Raises:
      ConfigError, EngineError: a placement that cannot be, or limits that do not hold; an
        `EngineError` from the limits means that a sequence of full length finds no room.
    """
    target = target or target_of(topology)
    check_devices(model, config, topology)
    weights = described_weights(model, config, target)
    draft = described_draft(config, target)
    limits = fit_limits(config, weights, target, draft=draft)
    return Engine(model, config, topology, target, weights, limits, draft)


def described_draft(config: EngineConfig, target: DeviceSpec) -> Weights | None:
    """The draft model's weights as shapes, if there is one."""
    speculation = config.speculative_config
    if not isinstance(speculation, DraftModel):
        return None
    return described_weights(read_model(speculation.model, config.dtype), config, target)


def described_weights(model: ServedModel, config: EngineConfig, target: DeviceSpec) -> Weights:
    """The weights as shapes."""
    dtype = jnp.dtype(model.dtype)
    return describe_weights(model.config, config, dtype, target, model.code_formats)


def check_devices(model: ServedModel, config: EngineConfig, topology: Topology) -> None:
    """Say what is wrong with a tensor parallelism, and what would do.

    Raises:
      ConfigError: more devices than a slice has, or heads that do not divide.
    """
    size, has = config.tensor_parallel_size, topology.num_devices // topology.slices
    fitting = [n for n in range(1, has + 1) if divides(model.config, n)]
    choices = ", ".join(map(str, fitting))
    if size > has:
        one = " in a slice" if topology.slices > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size={size} and {topology.name} has {has} devices{one}; use one of "
            f"{choices}, or a larger slice"
        )
    if not divides(model.config, size):
        m = model.config
        widths = " and ".join(map(str, m.mlp_widths))
        linear = f"{m.linear.sharded_heads} heads of linear layers, " if m.linear else ""
        raise ConfigError(
            f"tensor_parallel_size={size} does not fit the model's {m.num_heads} heads, {linear}"
            f"{m.kv_heads} key/value heads and MLP width {widths}: it must divide "
            f"heads and width, and divide the key/value heads or be a multiple of them; on "
            f"{topology.name} use one of {choices}"
        )
