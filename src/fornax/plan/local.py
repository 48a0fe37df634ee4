"""The topology of the machine that this runs on."""

from fornax.config import ConfigError
from fornax.mesh.hardware import chip_of
from fornax.plan.topology import Topology, parse_topology

__all__ = ["local_topology", "named_or_local"]


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
