"""The table of support says what is so: what it calls lowered for CUDA is, here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tests.cuda import lower_for_cuda
from tests.kernel_calls import sample_call

from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh
from fornax.plan.kernels.report import support_rows

GPU = [row[:2] for row in support_rows() if row[4] == "lowered"]


@pytest.mark.parametrize(("operation", "implementation"), GPU)
def test_what_is_called_lowered_for_cuda_is(
    operation: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kernels.operations()[operation]
    [one] = [each for each in found.implementations if each.name == implementation]
    if implementation == "ring":
        with use_mesh(make_mesh(MeshConfig(context=2), jax.devices()[:2])):
            q_BTNH = jnp.zeros((1, 512, 2, 64), jnp.bfloat16)
            run = functools.partial(kernels.attention, scale=1.0, implementation="ring")
            assert "collective_permute" in lower_for_cuda(monkeypatch, run, *[q_BTNH] * 3)
        return
    call = sample_call(operation, implementation, "gpu")
    if implementation == "tokamax" and one.reason(call) is not None:
        pytest.skip(
            "it asks this machine's GPU; tests/device lowers its kernels where it is installed"
        )
    assert one.reason(call) is None
    with kernels.target_platform("gpu"):
        work = found.benchmark(call, one.run)
    assert "func.func public @main" in lower_for_cuda(monkeypatch, work)


def test_what_is_not_in_the_table_is_declined() -> None:
    for name, operation in kernels.operations().items():
        for one in operation.implementations:
            for platform in {"cpu", "tpu", "gpu"} - set(one.support):
                call = sample_call(name, one.name, platform)
                assert one.reason(call) is not None, (name, one.name, platform)
