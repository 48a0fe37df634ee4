"""Every test sees eight virtual CPU devices; NPROC keeps XLA from a deadlock on fewer cores."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ["NPROC"] = "16"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis

# A shared machine is slow at times; what a property says does not depend on it.
hypothesis.settings.register_profile("fornax", deadline=None)
hypothesis.settings.load_profile("fornax")
