"""Mosaic GPU kernels interpreted on CPU, by jax's own interpreter of a Hopper.

It executes copies, barriers and products as callbacks. jax 0.10 has it in a private module, where
it knows neither the layouts of registers, which say nothing about values, nor transposed operands
of products; both are added here.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from fornax import kernels

__all__ = ["interpreted_hopper"]

Copies = dict[tuple[int, ...], list[tuple[Any, ...]]]
"""By array in global memory, the slices that were copied to shared memory, in order."""


@contextlib.contextmanager
def interpreted_hopper() -> Iterator[Copies]:
    """Choose implementations as for a GPU, and interpret their Mosaic kernels."""
    if jax.__version_info__[:2] > (0, 10):
        pytest.skip("the interpreter is adapted for jax 0.10")
    from jax._src.interpreters import mlir
    from jax._src.pallas.mosaic_gpu import core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, params

    copies: Copies = defaultdict(list)
    transfer = gpu_callbacks._execute_device_local_memory_transfer

    def recorded(**given: Any) -> Any:
        source = tuple(np.asarray(given["src_allocation_key_as_array"]).tolist())
        copies[source].append(_place(given["src_transforms"])[0])
        return transfer(**given)

    mlir.register_lowering(core.layout_cast_p, lambda _, x, **layout: [x])
    with (
        mock.patch.object(gpu_callbacks, "wgmma", _wgmma),
        mock.patch.object(gpu_callbacks, "_execute_device_local_memory_transfer", recorded),
        params.force_gpu_interpret_mode(params.InterpretGPUParams()),
        kernels.target_platform("gpu"),
    ):
        yield copies


def _place(transforms: Any) -> tuple[tuple[Any, ...], bool]:
    """Which part of an array they are of, and whether that is transposed at last."""
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    steps = gpu_callbacks._remove_noop_transforms(transforms)
    transposed = bool(steps) and hasattr(steps[-1], "permutation")
    return utils.to_range(jax.tree.map(int, steps[:-1] if transposed else steps)), transposed


def _wgmma(*, token: Any, acc_dtype: Any, **given: Any) -> Any:
    """Add a product to its accumulator."""
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    device, thread = int(given["device_id"]), int(given["thread_id"])
    memory = gpu_callbacks._get_shared_memory()
    thread = memory.get_global_thread_id(device, thread)
    info = utils.GPULoggingInfo(
        device_id=device,
        grid_point_coords=tuple(map(int, given["grid_point_coords"])),
        thread_id=thread,
        source_info=given["source_info"],
    )

    def operand(name: str) -> tuple[Any, tuple[Any, ...], np.ndarray]:
        key = gpu_callbacks.HostAllocationKey.from_array(given[f"{name}_allocation_key_as_array"])
        place, transposed = _place(given[f"{name}_transforms"])
        content, *_ = memory.get_buffer_content(key, place, thread, logging_info=info)
        return key, place, content.T if transposed else content

    key, place, acc = operand("acc")
    product = np.matmul(operand("a")[2], operand("b")[2], dtype=acc_dtype)
    memory.store_buffer_content(key, place, acc + product, thread, logging_info=info)
    return token
