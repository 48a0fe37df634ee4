"""XLA's flags for the tests and for processes that they start."""

import importlib.metadata
import os


def xla_flags(devices: int = 1) -> str:
    """So many CPU devices; where tests compile with few optimizations, no program is split to be
    compiled by many threads, and fused loops come from XLA's older emitters, in a third of the
    time. jaxlib 0.11 has the newer ones alone: they run in `make newest-test`, and in processes
    that no test starts."""
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true":
        flags.append("--xla_cpu_parallel_codegen_split_count=1")
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
