"""Every test sees eight virtual CPU devices; NPROC keeps XLA from a deadlock on fewer cores."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ["NPROC"] = "16"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
