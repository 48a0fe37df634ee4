"""Which chips a plan is for: `v5p:4x4x4`, `2*v6e:16x16`, `h100:8`, `h100:4x8`, `cpu`, `cpu:8`."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fornax.config.errors import ConfigError
from fornax.mesh.hardware import Chip, chip_of, find_chip
from fornax.mesh.hardware.cpu import cpu_chip

if TYPE_CHECKING:
    import jax

__all__ = [
    "Topology",
    "local_topology",
    "named_or_local",
    "parse_topology",
    "topology_shapes",
]

_FORM = re.compile(r"(?:(?P<slices>\d+)\s*[*]\s*)?(?P<chip>[\w.-]+?)(?::(?P<shape>\d+(?:x\d+)*))?")
_CUBE = 4
_EXAMPLES = "v5p:4x4x4, 2*v6e:16x16 (two slices), h100:8, h100:4x8 (nodes x GPUs), cpu:8"
_MOST_SLICES = 256


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Chips and how they are joined."""

    chip: Chip
    shape: tuple[int, ...]
    """TPU: chips along each axis of a slice's torus. GPU: nodes, GPUs a node. CPU: (devices,)."""
    slices: int = 1
    """Slices joined by the data-centre network only."""

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Whether the two ends of each axis are joined."""
        ring = self.chip.ring
        rings = tuple(bool(ring) and size % ring == 0 for size in self.shape)
        return rings if self.chip.torus == 2 else (all(rings) and bool(rings),) * len(self.shape)

    @property
    def name(self) -> str:
        """The text that `parse_topology` reads."""
        shape = self.shape
        if self.chip.platform == "gpu" and shape[0] == 1:
            shape = shape[1:]
        sizes = "x".join(map(str, shape))
        return f"{f'{self.slices}*' if self.slices > 1 else ''}{self.chip.name}:{sizes}"

    @property
    def accelerator(self) -> str:
        """Cloud's name for a TPU slice: generations with two cores per chip count cores."""
        name = "v5litepod" if self.chip.name == "v5e" else self.chip.name
        return f"{name}-{math.prod(self.shape) * (2 if self.chip.torus == 3 else 1)}"

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices."""
        return self.num_chips * self.chip.devices

    @property
    def host_shape(self) -> tuple[int, ...]:
        """The block of a slice's chips that one host holds."""
        if self.chip.platform != "tpu":
            return (1, *self.shape[1:]) if self.chip.platform == "gpu" else self.shape
        if math.prod(self.shape) <= 2 * self.chip.host_chips and self.chip.torus == 2:
            return self.shape  # one machine of up to eight chips
        return tuple(min(size, 2 if axis < 2 else 1) for axis, size in enumerate(self.shape))

    @property
    def num_hosts(self) -> int:
        """Machines, and so processes, of all slices."""
        return self.num_chips // math.prod(self.host_shape)

    def devices(self) -> "list[jax.Device]":
        """The compile-only JAX devices; needs libtpu, in a process made for compiling.

        Raises:
          ValueError: for chips other than TPUs.
        """
        if self.chip.platform != "tpu":
            raise ValueError(f"{self.name}: only TPU topologies have compile-only devices")
        from jax.experimental import topologies

        host = (*self.host_shape, *(1,) * (3 - len(self.host_shape)))
        wrap = (*self.wrap, *(False,) * (3 - len(self.wrap)))
        options: dict[str, object] = {"chips_per_host_bounds": host}
        if any(wrap):  # left out, the compiler takes every axis for a line
            options["wrap"] = wrap
        if self.chip.name == "v4":
            options["chip_config_name"] = "megacore"  # two cores as one device, as jobs have it
        if self.slices > 1:
            options["num_slices"] = self.slices
        sizes = "x".join(map(str, self.shape))
        described = topologies.get_topology_desc(
            topology_name=f"{self.chip.name}:{sizes}", platform="tpu", **options
        )
        return list(described.devices)


def parse_topology(text: str) -> Topology:
    """The topology that users write.

    Raises:
      ConfigError: for a form, a chip or a shape that does not exist, with those that do.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"topology {text!r} is not understood; write it like {_EXAMPLES}")
    slices = int(match["slices"] or 1)
    shape = tuple(int(size) for size in (match["shape"] or "").split("x") if size)
    if match["chip"].lower() == "cpu":
        return _cpu(text, shape, slices)
    chip = _chip(text, match["chip"])
    if not 1 <= slices <= _MOST_SLICES:
        raise ConfigError(f"topology {text!r}: use 1 to {_MOST_SLICES} slices")
    if not shape or 0 in shape:
        raise ConfigError(f"topology {text!r} names no chips; {_legal(chip)}")
    if chip.platform == "gpu":
        return _gpu(text, chip, shape, slices)
    _check_slice(text, chip, shape)
    return Topology(chip=chip, shape=shape, slices=slices)


def named_or_local(name: str | None) -> Topology:
    """The topology of this name; without one, this machine's.

    Raises:
      ConfigError: for a name that is none, or devices whose topology has to be named.
    """
    return parse_topology(name) if name else local_topology()


def local_topology() -> Topology:
    """What jax sees here: CPU devices, or the GPUs of this machine.

    Raises:
      ConfigError: for devices whose topology has to be named.
    """
    import jax

    devices = jax.devices()
    kind, count = devices[0].device_kind, len(devices)
    if devices[0].platform == "cpu":
        return parse_topology(f"cpu:{count}")
    chip = chip_of(kind)
    if chip is not None and chip.platform == "gpu":
        return parse_topology(f"{chip.name}:{count}")
    raise ConfigError(
        f"this machine has {count} devices of kind {kind}, and how they are joined is not known "
        "here; name the chips with --topology, such as v5p:4x4x4, v6e:2x4 or h100:8"
    )


def _chip(text: str, name: str) -> Chip:
    counted = re.fullmatch(r"(?:tpu-?)?(v4|v5e|v5litepod|v5p|v6e|trillium|tpu7x|7x)-(\d+)", name)
    if counted:  # Cloud's own names count cores or chips
        chip = find_chip(counted[1])
        cores = 2 if chip.torus == 3 else 1
        chips = int(counted[2]) // cores
        what = "TensorCores" if cores == 2 else "chips"
        same = [s for s in topology_shapes(chip) if math.prod(s) == chips]
        shapes = " or ".join(f"{chip.name}:{_text(shape)}" for shape in same)
        raise ConfigError(
            f"topology {text!r}: {name} counts {what} and does not say how they are joined; name "
            f"the shape, {f'here {shapes}' if shapes else _legal(chip)}"
        )
    try:
        return find_chip(name)
    except ConfigError as error:
        raise ConfigError(f"topology {text!r}: {error}. A topology reads {_EXAMPLES}") from None


def _cpu(text: str, shape: tuple[int, ...], slices: int) -> Topology:
    if slices != 1 or len(shape) > 1 or 0 in shape:
        raise ConfigError(f"topology {text!r}: a CPU is written cpu, or cpu:8 for virtual devices")
    devices = shape[0] if shape else 1
    return Topology(chip=cpu_chip(devices), shape=(devices,))


def _gpu(text: str, chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    if slices != 1:
        raise ConfigError(
            f"topology {text!r}: slices are TPU slices; for {slices} nodes of GPUs write "
            f"{chip.name}:{slices}x{shape[-1]}"
        )
    if len(shape) > 2 or shape[-1] > chip.node_chips:
        nodes = -(-math.prod(shape) // chip.node_chips)
        raise ConfigError(
            f"topology {text!r}: a node joins {chip.node_chips} {chip.name} GPUs; write nodes x "
            f"GPUs, the nearest is {chip.name}:{nodes}x{chip.node_chips}"
        )
    if len(shape) == 1:
        shape = (1, *shape)
    return Topology(chip=chip, shape=shape)


def _check_slice(text: str, chip: Chip, shape: tuple[int, ...]) -> None:
    if shape in chip.small_shapes:
        return
    cubes = len(shape) == chip.torus == 3 and all(size % _CUBE == 0 for size in shape)
    if cubes and tuple(sorted(shape)) == shape and math.prod(shape) <= math.prod(chip.largest):
        return
    count = math.prod(shape)
    shapes = topology_shapes(chip)
    ordered = tuple(sorted(shape))
    near = ordered if ordered in shapes else min(shapes, key=lambda s: _distance(s, count))
    raise ConfigError(
        f"topology {text!r}: there is no {chip.name} slice of {_text(shape)}; {_legal(chip)}; the "
        f"nearest is {chip.name}:{_text(near)} ({math.prod(near)} chips)"
    )


def _distance(shape: tuple[int, ...], count: int) -> tuple[float, int]:
    """How far a slice is from `count` chips, the more compact first."""
    return abs(math.log(math.prod(shape) / count)), sum(shape)


def topology_shapes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """Every slice shape of a TPU, dimensions ascending, the smallest first."""
    if chip.torus != 3:
        return chip.small_shapes
    most = math.prod(chip.largest)
    sizes = range(_CUBE, max(chip.largest) + 1, _CUBE)
    cubes = [
        (a, b, c) for a in sizes for b in sizes for c in sizes if a <= b <= c and a * b * c <= most
    ]
    return (*chip.small_shapes, *sorted(cubes, key=lambda s: (math.prod(s), s)))


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _legal(chip: Chip) -> str:
    if chip.platform == "gpu":
        return f"write GPUs of a node, {chip.name}:8, or nodes x GPUs, {chip.name}:4x8"
    shapes = ", ".join(map(_text, chip.small_shapes))
    if chip.torus != 3:
        return f"its slices are {shapes}"
    return (
        f"its slices are {shapes}, and ascending multiples of {_CUBE} such as 4x4x4, 4x4x8, 8x8x8 "
        f"up to {_text(chip.largest)}"
    )
