"""Attention on meshes of eight devices equals attention on one, values and gradients.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fornax import kernels
from fornax.mesh import (
    MeshConfig,
    balance_ids,
    balance_length,
    make_mesh,
    restore_length,
    use_mesh,
)
from fornax.models.decoder import document_positions

B, T, N, K, H = 8, 32, 8, 4, 16


def _arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _grads(implementation: str, segments: np.ndarray):
    def loss(q, k, v):
        o = kernels.attention(
            q,
            k,
            v,
            scale=0.25,
            segment_ids_q_BT=segments,
            segment_ids_k_BS=segments,
            sinks_N=jnp.arange(N, dtype=jnp.float32),
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(o)), o

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}],
    ids=str,
)
def test_agrees_with_one_device(sizes: dict[str, int], implementation: str) -> None:
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 1, 2]], B // 2, axis=0))
    segments = jnp.repeat(segments, T // 3 + 1, axis=1)[:, :T]
    expected = _grads(implementation, segments)(*_arrays())
    mesh = make_mesh(
        MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: int(np.prod(list(sizes.values())))]
    )
    heads = "tensor" if sizes.get("tensor", 1) <= K else None
    spec = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, heads, None))
    placed = [jax.device_put(a, spec) for a in _arrays()]
    with use_mesh(mesh):
        found = _grads(implementation, segments)(*placed)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("sizes", [{"context": 4}, {"context": 2, "tensor": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_divided_length_agrees_with_one_device(
    implementation: str, sizes: dict[str, int], balanced: bool
) -> None:
    """Packed documents, a window, sinks: heads are exchanged for the length, or XLA gathers."""
    segments = np.where(np.arange(T) < 11, 1, 2) * (np.arange(T) < 29)
    ids_BT = jnp.broadcast_to(jnp.asarray(segments, jnp.int32), (B, T))
    positions_BT = document_positions((B, T), ids_BT)
    sinks_N = jnp.arange(N, dtype=jnp.float32) / 4

    def grads(ordered: bool):
        def loss(q, k, v, sinks_N):
            ids, positions = ids_BT, positions_BT
            if ordered:
                ids, positions = balance_ids(ids), balance_ids(positions)
                q, k, v = (balance_length(x.reshape(B, T, -1)).reshape(x.shape) for x in (q, k, v))
            o = kernels.attention(
                *(q, k, v),
                scale=0.25,
                window=9,
                positions_q_BT=positions,
                positions_k_BS=positions,
                segment_ids_q_BT=ids,
                segment_ids_k_BS=ids,
                sinks_N=sinks_N,
                consecutive=True,
                balanced=ordered,
                implementation=implementation,
            )
            if ordered:
                o = restore_length(o.reshape(B, T, -1)).reshape(o.shape)
            return jnp.sum(jnp.sin(o)), o

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*_arrays(), sinks_N)

    expected = grads(False)
    count = int(np.prod(list(sizes.values())))
    with use_mesh(make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:count])):
        found = grads(balanced)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


def test_native_declines_a_divided_length() -> None:
    q, k, v = _arrays()
    mesh = make_mesh(MeshConfig(fsdp=1, context=8))
    with (
        use_mesh(mesh),
        pytest.raises(kernels.KernelError, match="divides the length over 8 devices"),
    ):
        kernels.attention(q, k, v, scale=1.0, implementation="native")
