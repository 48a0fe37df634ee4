"""The GPU route through cuDNN against the float64 reference: values and gradients.

Without a GPU the library's implementation for XLA stands in for cuDNN: it takes the same arguments
and gives them the same meaning, so that masks, chunks, windows and padding are checked here.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.kernels._attention import cudnn
from fornax.mesh import MeshConfig, make_mesh, use_mesh

B, T, N, K, H = 2, 96, 4, 2, 24


def _arrays(seed: int = 0, s: int = T) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q_BTNH": (B, T, N, H), "k_BSKH": (B, s, K, H), "v_BSKH": (B, s, K, H)}
    # What bfloat16 holds exactly, so that only the arithmetic differs.
    return {
        name: np.float64(np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16)))
        for name, shape in shapes.items()
    }


def _packed() -> dict[str, jax.Array]:
    """Documents of uneven lengths and padding at the end, and positions inside each."""
    segments = np.repeat([[1, 2, 3, 0], [1, 2, 2, 3]], T // 4, axis=1)
    segments[0, 20:30] = 2
    positions = np.zeros((B, T), np.int32)
    for row in range(B):
        for segment in np.unique(segments[row]):
            (where,) = np.nonzero(segments[row] == segment)
            positions[row, where] = np.arange(len(where))
    ids = {"segment_ids": segments, "positions": positions}
    both = (("q_BT", "k_BS"), ids.items())
    return {f"{name}_{side}": jnp.asarray(x, jnp.int32) for name, x in both[1] for side in both[0]}


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 17},
    "window both sides": {"window": 17, "causal": False},
    "packed": {**_packed(), "consecutive": True},
    "packed window": {**_packed(), "consecutive": True, "window": 9},
    "packed full": {**_packed(), "causal": False},
    "positions": _packed(),
}


def _loss(options: dict[str, Any], implementation: str):
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        o = kernels.attention(q, k, v, scale=0.2, implementation=implementation, **options)
        weights = jnp.asarray(np.random.default_rng(2).normal(size=o.shape))
        return jnp.sum(o.astype(weights.dtype) * weights), o

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def _run(options: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    with kernels.target_platform("gpu", interpret=True):
        given = [jnp.asarray(a, jnp.bfloat16) for a in arrays.values()]
        grads, o = _loss(options, "cudnn")(*given)
    return [np.float64(np.asarray(x)) for x in (o, *grads)]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_CHUNK", 32)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_float64_reference(name: str) -> None:
    arrays = _arrays()
    with jax.enable_x64(True):
        grads, o = _loss(CASES[name], "reference")(*(jnp.asarray(a) for a in arrays.values()))
        expected = [np.asarray(x) for x in (o, *grads)]
    for found, wanted in zip(_run(CASES[name], arrays), expected, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-2 * np.linalg.norm(wanted)


def test_padding_gives_zeros_takes_no_gradient_and_hides_what_it_holds() -> None:
    arrays = _arrays()
    clean = _run(CASES["packed"], arrays)
    padding = np.s_[0, 3 * T // 4 :]
    for value in arrays.values():
        value[padding] = 1e4
    found = _run(CASES["packed"], arrays)
    for dirty, expected in zip(found, clean, strict=True):
        assert np.all(dirty[padding] == 0)
        np.testing.assert_array_equal(dirty, expected)


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 1, "context": 2}], ids=str)
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_agrees_with_one_device_on_a_mesh(name: str, sizes: dict[str, int]) -> None:
    arrays = _arrays()
    expected = _run(CASES[name], arrays)
    count = sizes["fsdp"] * 2
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:count])
    with use_mesh(mesh):
        found = _run(CASES[name], arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)
