"""Paged attention for GPU: the kernel's numbers, interpreted, and that it lowers for CUDA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.kernels._paged_attention.call import PagedInputs
from fornax.kernels._paged_attention.gpu import gpu


def _arguments(dtype: Any, **changes: Any) -> dict[str, Any]:
    """A decode, a row without tokens, a chunk, a whole prompt, padding; stale slots hold NaN."""
    rng = np.random.default_rng(0)
    kv = rng.normal(size=(2, 60, 8, 4, 32))
    kv[:, 51:] = np.nan
    table = 1 + rng.permutation(50)[:48].reshape(4, 12)
    table[1] = 55
    arguments: dict[str, Any] = {
        "q_TNH": jnp.asarray(rng.normal(size=(90, 6, 32)), dtype),
        "kv_LPSCH": jnp.asarray(kv, dtype),
        "layer": jnp.asarray(1, jnp.int32),
        "page_table_RW": jnp.asarray(table, jnp.int32),
        "query_start_R1": jnp.asarray([0, 1, 1, 41, 81], jnp.int32),
        "context_lens_R": jnp.asarray([90, 0, 77, 40], jnp.int32),
        "scale": 0.2,
    }
    return {**arguments, **changes}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 9},
    {"softcap": 2.0},
    {"sinks_N": jnp.asarray([0.5, -1.0, 2.0, 30.0, 0.0, 1.0])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
def test_agrees_with_the_reference_when_interpreted(
    dtype: Any, tolerance: float, options: dict[str, Any]
) -> None:
    arguments = _arguments(dtype, **options)
    expected = kernels.paged_attention(**arguments, implementation="reference")
    defaults: dict[str, Any] = {"sinks_N": None, "window": None, "softcap": None}
    inputs = PagedInputs(**{**defaults, **arguments})
    found = jax.jit(lambda: gpu(inputs, interpret=True))()
    np.testing.assert_allclose(
        np.asarray(found, np.float32),
        np.asarray(expected, np.float32),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("tokens", [4, 90])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowers_for_cuda(dtype: Any, tokens: int, options: dict[str, Any]) -> None:
    arguments = _arguments(dtype, **options)
    q_TNH = arguments.pop("q_TNH")[:tokens]

    def attend(q_TNH: jax.Array) -> jax.Array:
        return kernels.paged_attention(q_TNH, **arguments, implementation="pallas_gpu")

    with kernels.target_platform("gpu"):
        lowered = jax.jit(attend).trace(q_TNH).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q_TNH": jnp.ones((9, 6, 24)), "kv_LPSCH": jnp.ones((2, 60, 8, 4, 24))}, "power of two"),
        ({"kv_LPSCH": jnp.ones((2, 60, 8, 4, 32), jnp.float8_e4m3fn)}, "float8_e4m3fn"),
    ],
)
def test_declines(changes: dict[str, Any], reason: str) -> None:
    with (
        kernels.target_platform("gpu"),
        pytest.raises(kernels.KernelError, match=reason),
    ):
        kernels.paged_attention(**_arguments(jnp.float32, **changes), implementation="pallas_gpu")
