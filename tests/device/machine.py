"""Which machine these tests run on: `DEVICE=gpu`, or `DEVICE=cpu` for small sizes, interpreted.

On a GPU the programs are compiled and run there. Without one every test runs at a small size, with
the implementations that a GPU would get interpreted, and its program is lowered for CUDA.
"""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest
from tests.cuda import lower_for_cuda

from fornax import kernels

__all__ = ["DEVICE", "ON_GPU", "as_on_gpu", "cpu", "error", "exact_products", "lowers", "on_cpu"]

DEVICE = os.environ.get("DEVICE", "cpu")
ON_GPU = DEVICE == "gpu"


def as_on_gpu() -> AbstractContextManager[None]:
    """Choose implementations as on a GPU: the real ones there, interpreted ones elsewhere."""
    if ON_GPU:
        return contextlib.nullcontext()
    return kernels.target_platform("gpu", interpret=True)


def cpu() -> jax.Device:
    """The processor of this machine, which computes what is expected."""
    return jax.local_devices(backend="cpu")[0]


@contextlib.contextmanager
def on_cpu() -> Any:
    """Compute on the processor, with its implementations."""
    with jax.default_device(cpu()), kernels.target_platform("cpu"):
        yield


@contextlib.contextmanager
def exact_products() -> Any:
    """Multiply float32 as such, also in programs that other threads compile: a GPU takes tf32."""
    name = "jax_default_matmul_precision"
    before = jax.config.jax_default_matmul_precision
    jax.config.update(name, "highest")
    try:
        yield
    finally:
        jax.config.update(name, before)


def lowers(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: Any) -> str:
    """Lower `function` for CUDA, on either machine."""
    return lower_for_cuda(monkeypatch, function, *arguments)


def error(found: Any, expected: Any) -> float:
    """The norm of the difference over that of what is expected; NaN counts as infinite."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    value = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    return float(value) if np.isfinite(value) else float("inf")
