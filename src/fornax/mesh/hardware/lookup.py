"""Finding a chip by the name that users or jax have for it."""

from collections.abc import Mapping

from fornax.config.errors import ConfigError
from fornax.config.suggest import nearest
from fornax.mesh.hardware.chip import Chip
from fornax.mesh.hardware.gpu import GPUS
from fornax.mesh.hardware.tpu import TPUS

__all__ = ["CHIPS", "chip_of", "find_chip"]

_CHIPS = (*TPUS, *GPUS)

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _CHIPS}
"""Every known chip by name. A CPU is not here: it is measured."""


def find_chip(name: str) -> Chip:
    """The chip that users call `name`.

    Raises:
      ConfigError: for an unknown one, with the nearest.
    """
    named = {alias: chip for chip in _CHIPS for alias in (chip.name, *chip.aliases)}
    wanted = name.strip().lower().removeprefix("tpu-")
    if wanted in named:
        return named[wanted]
    near = nearest(wanted, named)
    hint = f"; did you mean {named[near].name}?" if near else ""
    raise ConfigError(f"chip {name!r} is not known; use one of {', '.join(CHIPS)}, cpu{hint}")


def chip_of(device_kind: str) -> Chip | None:
    """The chip behind a `jax.Device.device_kind`, if it is a known one."""
    return next((chip for chip in _CHIPS if device_kind in chip.kinds), None)
