"""The TPU flash kernel, interpreted on CPU, against the float64 reference: values and gradients.

Legend: B batch, T tokens, N query heads, K key/value heads, H head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.cases import one_in

from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

B, T, N, K, H = 2, 256, 4, 2, 32


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the kernel, with blocks so small that these lengths fill several."""
    monkeypatch.setattr("fornax.kernels._attention.splash._INTERPRET", True)
    for name in ("_QUERIES", "_KEYS", "_KEYS_BACKWARD", "_COMPUTE"):
        monkeypatch.setattr(f"fornax.kernels._attention.blocks.{name}", 128)


def _packed() -> dict[str, np.ndarray]:
    """Row 0: two documents and padding at both ends; the others: three documents."""
    segments = np.ones((B, T), np.int32)
    segments[0, :5], segments[0, 110:200], segments[0, 200:] = 0, 2, 0
    segments[1:, 100:170], segments[1:, 170:] = 2, 3
    positions = np.zeros((B, T), np.int32)
    for row in range(B):
        for segment in np.unique(segments[row]):
            (where,) = np.nonzero(segments[row] == segment)
            positions[row, where] = np.arange(len(where))
    both = {"segment_ids": segments, "positions": positions}
    return {f"{n}_{end}": a for n, a in both.items() for end in ("q_BT", "k_BS")}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "full": ({}, {"causal": False}),
    "window": ({}, {"window": 100}),
    "window both sides": ({}, {"window": 100, "causal": False}),
    "softcap": ({}, {"softcap": 1.5}),
    "packed": (_packed(), {"consecutive": True}),
    "packed, window, softcap": (_packed(), {"consecutive": True, "window": 70, "softcap": 2.0}),
    "sinks": ({"sinks_N": np.random.default_rng(1).normal(size=N)}, {}),
    "packed sinks": (
        {**_packed(), "sinks_N": np.random.default_rng(1).normal(size=N)},
        {"consecutive": True},
    ),
}


def _qkv(kv_heads: int = K, width: int = H, values: int = H) -> Any:
    rng = np.random.default_rng(0)
    return {
        "q_BTNH": rng.normal(size=(B, T, N, width)),
        "k_BSKH": rng.normal(size=(B, T, kv_heads, width)),
        "v_BSKH": rng.normal(size=(B, T, kv_heads, values)),
    }


def _run(arrays: dict[str, Any], options: dict[str, Any], dtype: Any, implementation: str) -> Any:
    """Output and gradients of a fixed weighting of it."""
    floating = {n: jnp.asarray(a, dtype) for n, a in arrays.items() if a.dtype == np.float64}
    integers = {n: jnp.asarray(a) for n, a in arrays.items() if a.dtype != np.float64}
    scale = arrays["q_BTNH"].shape[-1] ** -0.5

    def weighed(floating: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o = kernels.attention(
            **floating, **integers, **options, scale=scale, implementation=implementation
        )
        weights = jnp.asarray(np.random.default_rng(2).normal(size=o.shape), dtype)
        return jnp.sum((o * weights).astype(jnp.promote_types(dtype, jnp.float32))), o

    with kernels.target_platform("tpu"):
        grads, o = jax.jit(jax.grad(weighed, has_aux=True))(floating)
    return jax.tree.map(np.float64, {"o": o, **grads})


def _expected(arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    with jax.enable_x64(True):
        return _run(arrays, options, jnp.float64, "reference")


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_float32_agrees_with_float64_reference(name: str) -> None:
    arrays, options = CASES[name]
    arrays = {**_qkv(), **arrays}
    found = _run(arrays, options, jnp.float32, "splash")
    for key, value in _expected(arrays, options).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_any_lengths_agree_where_all_keys_are_seen(shards: int, masked: bool) -> None:
    random = np.random.default_rng(3)
    queries, keys = 140, 72
    arrays = {
        "q_BTNH": random.normal(size=(B, queries, N, H)),
        "k_BSKH": random.normal(size=(B, keys, K, H)),
        "v_BSKH": random.normal(size=(B, keys, K, H)),
    }
    if masked:  # as texts of different lengths are
        seen = np.arange(keys) < np.array([[40], [72]])
        arrays["segment_ids_q_BT"] = np.ones((B, queries), np.int32)
        arrays["segment_ids_k_BS"] = seen.astype(np.int32)
    mesh = make_mesh(MeshConfig(fsdp=1, context=shards), jax.devices()[:shards])
    with use_mesh(mesh):
        found = _run(arrays, {"causal": False}, jnp.float32, "splash")
    for key, value in _expected(arrays, {"causal": False}).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=2e-5, err_msg=key)


@pytest.mark.slow
def test_unfused_backward_and_other_widths_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fornax.kernels._attention.blocks._MOST_PARTS", 1)
    arrays = {**_qkv(kv_heads=1, width=24, values=40), **_packed()}
    found = _run(arrays, {"consecutive": True}, jnp.float32, "splash")
    for key, value in _expected(arrays, {"consecutive": True}).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=2e-5, err_msg=key)


def test_bfloat16_agrees_to_its_precision() -> None:
    arrays, options = CASES["packed, window, softcap"]
    arrays = {**_qkv(), **arrays}
    found = _run(arrays, options, jnp.bfloat16, "splash")
    for key, value in _expected(arrays, options).items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[key] / scale, value / scale, atol=3e-2, err_msg=key)


def test_padding_gives_zeros_and_takes_no_gradient() -> None:
    arrays, options = CASES["packed"]
    arrays = {**_qkv(), **arrays}
    clean = _run(arrays, options, jnp.float32, "splash")
    for name in ("q_BTNH", "k_BSKH", "v_BSKH"):
        arrays[name] = arrays[name].copy()
        arrays[name][0, :5] = 1e4  # garbage in the padding must not matter
    found = _run(arrays, options, jnp.float32, "splash")
    for name, value in found.items():
        assert np.all(value[0, :5] == 0), name
        np.testing.assert_array_equal(value, clean[name], err_msg=name)


@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2, "context": 2}],
    ids=str,
)
def test_agrees_on_a_mesh(sizes: dict[str, int]) -> None:
    arrays = {**_qkv(), **_packed()}
    expected = _expected(arrays, {"consecutive": True, "window": 200})
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:count])
    with use_mesh(mesh):
        found = _run(arrays, {"consecutive": True, "window": 200}, jnp.float32, "splash")
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions_q_BT": 1, "positions_k_BS": 1}, "positions are consecutive"),
        ({"length": 200}, "multiple of 128 tokens per device, not 200"),
        ({"dtype": jnp.float16}, "float16"),
    ],
)
def test_declines(changes: dict[str, Any], reason: str) -> None:
    length, dtype = changes.pop("length", 256), changes.pop("dtype", jnp.float32)
    queries = changes.pop("queries", length)
    for name in ("positions_q_BT", "positions_k_BS"):
        if name in changes:
            changes[name] = jnp.zeros((1, length), jnp.int32)
    q, k = jnp.zeros((1, queries, 2, 16), dtype), jnp.zeros((1, length, 2, 16), dtype)
    with (
        kernels.target_platform("tpu"),
        pytest.raises(kernels.KernelError, match=reason),
    ):
        kernels.attention(q, k, k, scale=1.0, implementation="splash", **changes)


def test_on_cpu_it_declines() -> None:
    q = jnp.zeros((1, 256, 2, 16))
    with pytest.raises(kernels.KernelError, match="runs on tpu, not on cpu"):
        kernels.attention(q, q, q, scale=1.0, implementation="splash")


def test_a_length_that_shards_of_the_mesh_cannot_block_is_declined() -> None:
    q = jnp.zeros((1, 256, 2, 16))
    mesh = make_mesh(MeshConfig(fsdp=1, context=4), jax.devices()[:4])
    placed = jax.device_put(q, NamedSharding(mesh, PartitionSpec(None, "context")))
    with (
        kernels.target_platform("tpu"),
        use_mesh(mesh),
        pytest.raises(kernels.KernelError, match="not 256 over 4"),
    ):
        kernels.attention(placed, placed, placed, scale=1.0, implementation="splash")
