"""What accelerators can do: one table of published facts, each with its source.

Everything is per chip, as users rent it; `Chip.devices` says how many JAX devices that is. Sources:

- Cloud TPU: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x (Ironwood)".
- Compute Engine: Google's page on TPU machine types.
- Scaling book: "How to Scale Your Model", parts 2 (TPUs) and 12 (GPUs).
- Lockwood: glennklockwood.com/garden/processors, which cites NVIDIA's data sheets.
- compiler: what libtpu answers 0.0.42.1 answers of a program that does not fit.
- derived: arithmetic on other fields.
"""

from fornax.mesh.hardware.chip import Chip
from fornax.mesh.hardware.lookup import CHIPS, chip_of, find_chip

__all__ = ["CHIPS", "Chip", "chip_of", "find_chip"]
