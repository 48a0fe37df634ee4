"""Every linear cross-entropy implementation against the float64 reference, on one device and eight.

Legend: T tokens, D model width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

T, D, V = 40, 16, 72

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 2.0},
    "both": {"z_loss": 1e-2, "softcap": 2.0},
}


def _inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 1.5, size=T)
    weights[rng.permutation(T)[:9]] = 0
    targets = rng.integers(0, V, size=T)
    targets[weights == 0] = -100
    return {
        "x_TD": rng.normal(size=(T, D)),
        "w_DV": rng.normal(size=(D, V)) * 0.3,
        "weights_T": weights,
        "targets_T": targets.astype(np.int32),
    }


def _run(dtype: Any, arrays: dict[str, np.ndarray] | None = None, **options: Any) -> dict[str, Any]:
    """Sums and gradients of half the loss sum, as float64 numpy arrays."""
    arrays = arrays or _inputs()
    targets_T = jnp.asarray(arrays["targets_T"])
    weight_dtype = jnp.promote_types(dtype, jnp.float32)
    floating = {
        "x_TD": jnp.asarray(arrays["x_TD"], dtype),
        "w_DV": jnp.asarray(arrays["w_DV"], dtype),
        "weights_T": jnp.asarray(arrays["weights_T"], weight_dtype),
    }

    def half(floating: dict[str, jax.Array]) -> tuple[jax.Array, kernels.LossSums]:
        sums = kernels.linear_cross_entropy(**floating, targets_T=targets_T, **options)
        return 0.5 * sums.loss_sum + 0.25 * sums.weight_sum, sums

    grads, sums = jax.jit(jax.grad(half, has_aux=True))(floating)
    values = jax.jit(lambda f: half(f)[1])(floating)
    np.testing.assert_allclose(np.float64(values.loss_sum), np.float64(sums.loss_sum), rtol=1e-5)
    return {name: np.float64(a) for name, a in {**sums._asdict(), **grads}.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    with jax.enable_x64(True):
        return {
            name: _run(jnp.float64, implementation="reference", **options)
            for name, options in OPTIONS.items()
        }


def _names() -> list[str]:
    """All but the reference, which plays against itself in float64."""
    names = [i.name for i in kernels.cross_entropy_operation.implementations]
    return [name for name in names if name != "reference"]


def _assert_close(found: dict[str, Any], value: dict[str, Any], rtol: float) -> None:
    for name, exact in value.items():
        scale = np.abs(exact).max() or 1.0
        np.testing.assert_allclose(
            found[name] / scale, exact / scale, rtol=0, atol=rtol, err_msg=name
        )


@pytest.mark.parametrize("implementation", _names())
@pytest.mark.parametrize("chunk", [1, 16, 1000])
@pytest.mark.parametrize("name", OPTIONS)
def test_float32_agrees_with_float64_reference(
    name: str, chunk: int, implementation: str, expected: dict[str, dict[str, Any]]
) -> None:
    found = _run(jnp.float32, implementation=implementation, chunk=chunk, **OPTIONS[name])
    _assert_close(found, expected[name], 1e-5)


@pytest.mark.parametrize("implementation", _names())
def test_bfloat16_agrees_to_its_precision(
    implementation: str, expected: dict[str, dict[str, Any]]
) -> None:
    found = _run(jnp.bfloat16, implementation=implementation, chunk=16, **OPTIONS["both"])
    del found["correct_sum"]  # near ties may fall either way
    close = {name: value for name, value in expected["both"].items() if name in found}
    _assert_close(found, close, 2e-2)


@pytest.mark.parametrize("implementation", _names())
def test_tokens_of_weight_zero_add_nothing_whatever_they_hold(implementation: str) -> None:
    arrays = _inputs()
    clean = _run(jnp.float32, arrays, implementation=implementation, chunk=16)
    arrays["x_TD"][arrays["weights_T"] == 0] = np.inf
    found = _run(jnp.float32, arrays, implementation=implementation, chunk=16)
    assert found["loss_sum"] == clean["loss_sum"]
    assert found["correct_sum"] == clean["correct_sum"]


@pytest.mark.parametrize("implementation", _names())
@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"fsdp": 8}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 4}],
    ids=str,
)
def test_sharded_batch_and_vocabulary_agree(
    sizes: dict[str, int], implementation: str, expected: dict[str, dict[str, Any]]
) -> None:
    config = MeshConfig(**{"fsdp": 1, **sizes})
    mesh = make_mesh(config, jax.devices()[: int(np.prod(list(sizes.values())))])
    batch = ("slice", "data", "fsdp", "expert", "context")
    placed = {
        "x_TD": PartitionSpec(batch, None),
        "w_DV": PartitionSpec("fsdp", "tensor"),
        "targets_T": PartitionSpec(batch),
        "weights_T": PartitionSpec(batch),
    }
    shardings = {name: NamedSharding(mesh, spec) for name, spec in placed.items()}
    arrays = {
        name: jax.device_put(a.astype(np.float32) if a.dtype == np.float64 else a, shardings[name])
        for name, a in _inputs().items()
    }

    def half(x: jax.Array, w: jax.Array) -> tuple[jax.Array, kernels.LossSums]:
        sums = kernels.linear_cross_entropy(
            x,
            w,
            arrays["targets_T"],
            arrays["weights_T"],
            chunk=2,
            implementation=implementation,
            **OPTIONS["both"],
        )
        return 0.5 * sums.loss_sum, sums

    with use_mesh(mesh):
        step = jax.jit(jax.grad(half, (0, 1), has_aux=True))
        (dx, dw), sums = step(arrays["x_TD"], arrays["w_DV"])
    exact = {n: v for n, v in expected["both"].items() if n != "weights_T"}
    found = {**{n: np.float64(a) for n, a in sums._asdict().items()}, "x_TD": dx, "w_DV": dw}
    _assert_close(found, exact, 1e-5)
