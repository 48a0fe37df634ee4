"""Peak arithmetic of the devices of a run, for utilisation."""

import jax

from fornax.mesh.hardware import chip_of

__all__ = ["peak_flops"]


def peak_flops(given_tflops: float | None = None) -> float | None:
    """Peak bfloat16 FLOP/s of all devices together, or None when the device is not a known one.

    Args:
      given_tflops: what the user says one device can do.
    """
    if given_tflops:
        return given_tflops * 1e12 * jax.device_count()
    chip = chip_of(jax.devices()[0].device_kind)
    return None if chip is None else chip.peak() / chip.devices * jax.device_count()
