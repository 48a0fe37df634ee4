"""What is known of one kind of accelerator, and how fast it multiplies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Chip"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator."""

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    aliases: tuple[str, ...] = ()
    """Other names that users give it."""
    kinds: tuple[str, ...]
    """What `jax.Device.device_kind` says."""
    devices: int = 1
    """JAX devices of a chip."""
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by dtype: bfloat16, float32 (as XLA multiplies by default: one bfloat16 pass on
    TPU, TF32 on GPU), int8, float8. A dtype left out has no unit of its own: see `peak`."""
    memory_bytes: float
    """HBM."""
    usable_bytes: float
    """What a program may take of it."""
    memory_bandwidth: float
    """Bytes/s of HBM."""
    link_bandwidth: float
    """Bytes/s one way over one ICI link; of a GPU, one way over all its NVLinks."""
    torus: int
    """Dimensions of the ICI torus; 0 for a switch."""
    network_bandwidth: float
    """Bytes/s one way over the data-centre network."""
    host_bandwidth: float
    """Bytes/s one way over PCIe to the host."""
    host_chips: int
    """Chips a host."""
    node_chips: int = 0
    """GPUs that NVLink (or, on an L4, PCIe) joins; 0 for TPU."""
    compute_capability: float | None = None
    """Of a GPU: NVIDIA's number of what its instructions are."""
    clock: float | None = None
    """Hz, where it is known."""
    small_shapes: tuple[tuple[int, ...], ...] = ()
    """Slice shapes on offer that are not whole cubes; of a two-dimensional torus all shapes."""
    largest: tuple[int, ...] = ()
    """The largest slice of a three-dimensional torus, whose dimensions are multiples of 4."""
    ring: int = 0
    """A dimension that is a multiple of this has its two ends joined; in three dimensions all of
    them must be."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """What programs were measured to reach of these rates, by field of `fornax.hlo.Calibration`;
    empty for the shares that are known of the kind of chip."""
    sources: Mapping[str, str]
    """Field to the public source of its value."""

    def peak(self, dtype: str = "bfloat16") -> float:
        """FLOP/s of products of `dtype`; of one without a unit of its own, the rate of the next
        wider one that has."""
        if dtype.startswith(("float8", "float4")):
            names = ("float8", "bfloat16")
        elif dtype.startswith(("int", "uint")):
            names = ("int8", "bfloat16")
        elif dtype in ("float32", "float64"):
            names = ("float32",)
        else:
            names = ("bfloat16",)
        return next(self.peak_flops[name] for name in names if name in self.peak_flops)
