"""GPUs, with the sources of their figures: dense arithmetic, as NVIDIA's sheets halved."""

from collections.abc import Mapping

from fornax.mesh.hardware.chip import Chip

__all__ = ["GPUS"]


def _gpu(
    name: str,
    kinds: tuple[str, ...],
    tflops: Mapping[str, float],
    *,
    capability: float,
    gigabytes: float,
    bandwidth: float,
    nvlink: float,
    network: float,
    pcie: float,
    sources: Mapping[str, str],
    aliases: tuple[str, ...] = (),
) -> Chip:
    """A GPU of a node of eight; bandwidths in GB/s, one way."""
    return Chip(
        name=name,
        platform="gpu",
        aliases=aliases,
        kinds=kinds,
        peak_flops={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        memory_bytes=gigabytes * 1e9,
        usable_bytes=0.75 * gigabytes * 1e9,
        memory_bandwidth=bandwidth * 1e9,
        link_bandwidth=nvlink * 1e9,
        torus=0,
        network_bandwidth=network * 1e9,
        host_bandwidth=pcie * 1e9,
        host_chips=8,
        node_chips=8,
        compute_capability=capability,
        sources={
            "usable_bytes": "jax's documentation: three quarters are taken at start",
            "host_bandwidth": "PCIe: 16 lanes of generation 4 (32 GB/s) or 5 (64 GB/s)",
            "host_chips": "Scaling book: a node has eight",
            "compute_capability": "NVIDIA: CUDA GPU Compute Capability",
            **sources,
        },
    )


_AMPERE = {"bfloat16": 312.0, "float32": 156.0, "int8": 624.0}
_HOPPER = {"bfloat16": 989.4, "float32": 494.7, "int8": 1978.9, "float8": 1978.9}
_A100 = {
    "peak_flops": "Lockwood, A100",
    "memory_bytes": "Lockwood, A100",
    "memory_bandwidth": "Lockwood, A100",
    "link_bandwidth": "Scaling book",
    "network_bandwidth": "NVIDIA DGX A100: 200 Gbit/s a GPU",
}
_H100 = {
    "peak_flops": "Lockwood, H100 (half of NVIDIA's figures with sparsity)",
    "memory_bytes": "Lockwood, H100",
    "memory_bandwidth": "Lockwood, H100",
    "link_bandwidth": "Scaling book",
    "network_bandwidth": "Scaling book: 400 Gbit/s a GPU",
}

GPUS = (
    _gpu(
        "a100-40",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _AMPERE,
        capability=8.0,
        gigabytes=40,
        bandwidth=1555,
        nvlink=300,
        network=25,
        pcie=32,
        sources=_A100,
    ),
    _gpu(
        "a100-80",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB", "NVIDIA A100 80GB PCIe"),
        _AMPERE,
        capability=8.0,
        gigabytes=80,
        bandwidth=2039,
        nvlink=300,
        network=25,
        pcie=32,
        sources=_A100,
        aliases=("a100",),
    ),
    _gpu(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        _HOPPER,
        capability=9.0,
        gigabytes=80,
        bandwidth=3350,
        nvlink=450,
        network=50,
        pcie=64,
        sources=_H100,
        aliases=("h100-sxm",),
    ),
    _gpu(
        "h100-pcie",
        ("NVIDIA H100 PCIe",),
        {"bfloat16": 756.0, "float32": 378.0, "int8": 1513.0, "float8": 1513.0},
        capability=9.0,
        gigabytes=80,
        bandwidth=2000,
        nvlink=64,
        network=50,
        pcie=64,
        sources={
            **_H100,
            "peak_flops": "HPC Tech's copy of NVIDIA's H100 PCIe figures, halved for sparsity",
            "memory_bandwidth": "NVIDIA H100 PCIe product brief PB-11133-001",
            "link_bandwidth": "PCIe generation 5; NVLink bridges join pairs only",
        },
    ),
    _gpu(
        "h200",
        ("NVIDIA H200",),
        _HOPPER,
        capability=9.0,
        gigabytes=141,
        bandwidth=4800,
        nvlink=450,
        network=50,
        pcie=64,
        sources={**_H100, "memory_bytes": "Scaling book", "memory_bandwidth": "Scaling book"},
    ),
    _gpu(
        "b200",
        ("NVIDIA B200",),
        {"bfloat16": 2250.0, "float32": 1100.0, "int8": 4500.0, "float8": 4500.0},
        capability=10.0,
        gigabytes=180,
        bandwidth=7700,
        nvlink=900,
        network=50,
        pcie=64,
        sources={
            "peak_flops": "Lockwood, B200",
            "memory_bytes": "NVIDIA HGX B200 (192 GB nominal)",
            "memory_bandwidth": "NVIDIA HGX B200 (8000 GB/s nominal)",
            "link_bandwidth": "Lockwood, B200",
            "network_bandwidth": "H100's 400 Gbit/s a GPU is taken",
        },
    ),
    _gpu(
        "l4",
        ("NVIDIA L4",),
        {"bfloat16": 121.0, "float32": 60.0, "int8": 242.5, "float8": 242.5},
        capability=8.9,
        gigabytes=24,
        bandwidth=300,
        nvlink=32,
        network=1.5625,
        pcie=32,
        sources={
            "peak_flops": "NVIDIA L4 data sheet, halved for sparsity",
            "memory_bytes": "NVIDIA L4 data sheet",
            "memory_bandwidth": "NVIDIA L4 data sheet",
            "link_bandwidth": "PCIe generation 4: an L4 has no NVLink",
            "network_bandwidth": "Compute Engine G2: 100 Gbit/s for eight",
        },
    ),
)
