"""Grouped products by Tokamax: what they decline and why, and that all three lower for CUDA.

Numbers beside float64 are in `tests/device`. Legend: M rows, E groups, K inputs, N outputs.
"""

import dataclasses
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from tests.cuda import lower_for_cuda

from fornax import kernels
from fornax.kernels._grouped import hopper

CALL = kernels.GroupedCall("gpu", 512, 8, 256, 384, "bfloat16", devices=1)


def _reason(call: kernels.GroupedCall) -> str:
    return kernels.grouped_matmul_operation.explain(call)["tokamax"]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library cannot be imported, installed or not."""
    monkeypatch.setitem(sys.modules, "tokamax", None)
    hopper._missing.cache_clear()
    yield
    hopper._missing.cache_clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"platform": "cpu"}, "runs on gpu, not on cpu", id="platform"),
        pytest.param({"dtype": "float32"}, "bfloat16 and float16, not float32", id="dtype"),
        pytest.param({"inputs": 192}, "multiples of 128, not 192 and 384", id="inputs"),
        pytest.param({"rows": 1000}, "up to 64 rows or a multiple of 128, not 1000", id="rows"),
        pytest.param({"outputs": 64}, "multiples of 128, not 256 and 64", id="outputs"),
        pytest.param({"devices": 4}, "call it in shard_map", id="mesh"),
    ],
)
def test_declines_what_the_kernels_cannot_take(change: dict[str, object], reason: str) -> None:
    assert reason in _reason(dataclasses.replace(CALL, **change))


@pytest.mark.usefixtures("absent")
def test_without_the_library_xla_multiplies_and_says_how_to_get_it() -> None:
    choice = kernels.grouped_matmul_operation.choice(CALL)
    assert choice.implementation == "ragged_dot"
    assert "pip install 'fornax-ai[tokamax]'" in str(choice)


def test_without_a_gpu_xla_multiplies() -> None:
    pytest.importorskip("tokamax", reason="the extra tokamax is not installed")
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    choice = kernels.grouped_matmul_operation.choice(CALL)
    assert choice.implementation == "ragged_dot"
    assert "this machine's GPU, and there is none" in str(choice)


@pytest.mark.parametrize(
    ("rows", "groups", "inputs", "outputs"),
    [(512, 8, 256, 384), (8, 256, 2048, 768), (1024, 3, 128, 128)],
    ids=["training", "decoding", "groups that blocks do not divide"],
)
def test_each_product_is_a_kernel_on_hopper(
    rows: int, groups: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokamax", reason="the extra tokamax is not installed")

    def products(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> object:
        y, pull = jax.vjp(lambda x, w: kernels.grouped_matmul(x, w, sizes), x, w)
        return y, pull(dy)

    shapes = (rows, inputs), (groups, inputs, outputs), (rows, outputs)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    text = lower_for_cuda(monkeypatch, products, x, w, sizes, dy)
    assert text.count("custom_call @mosaic_gpu") == 3
    assert '"chlo.ragged_dot"' not in text
