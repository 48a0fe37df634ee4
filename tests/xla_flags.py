"""XLA's flags for the tests and for processes that they start."""

import importlib.metadata
import os


def xla_flags(devices: int = 1) -> str:
    """So many CPU devices and, where tests compile with few optimizations, XLA's older emitters of
    fused loops, which take a third of the time. jaxlib 0.11 has the newer ones alone: they run in
    `make newest-test`, and in processes that no test starts."""
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    quick = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true"
    if quick and importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
