"""Lowering for CUDA where neither a GPU nor its libraries are installed."""

import importlib.util
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest

from fornax import kernels

__all__ = ["lower_for_cuda"]


def lower_for_cuda(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: Any
) -> str:
    """Return the program that `function` becomes for a GPU, as StableHLO.

    jax asks the CUDA plugin for cuDNN's version before it writes a call of it down; without the
    plugin the newest one that jax 0.10 names is used in its place. Tokamax asks the device which
    kernels to write down; without one they are Hopper's.
    """
    found = "jax._src.cudnn.fused_attention_stablehlo.cuda_versions"
    if jax.default_backend() != "gpu":
        monkeypatch.setattr(found, types.SimpleNamespace(cudnn_get_version=lambda: 91100))
        monkeypatch.setattr("fornax.kernels._grouped.hopper._other_device", lambda: None)
        if importlib.util.find_spec("tokamax") is not None:
            monkeypatch.setattr("tokamax._src.gpu_utils.is_sm90", lambda *_: True)
    with kernels.target_platform("gpu"):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
