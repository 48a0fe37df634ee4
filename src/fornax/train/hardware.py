"""Peak arithmetic of known devices, for utilisation."""

import jax

__all__ = ["peak_flops"]

_PEAK_TFLOPS = {
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU7x": 2307.0,
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
}
"""Dense bfloat16 TFLOP/s of one device as jax counts devices, from the makers' data sheets."""


def peak_flops(given_tflops: float | None = None) -> float | None:
    """Peak FLOP/s of all devices together, or None when the device is not a known one.

    Args:
      given_tflops: what the user says one device can do.
    """
    tflops = given_tflops or _lookup(jax.devices()[0].device_kind)
    return None if tflops is None else tflops * 1e12 * jax.device_count()


def _lookup(kind: str) -> float | None:
    """The longest name that `kind` starts with."""
    names = [name for name in _PEAK_TFLOPS if kind.startswith(name)]
    return _PEAK_TFLOPS[max(names, key=len)] if names else None
