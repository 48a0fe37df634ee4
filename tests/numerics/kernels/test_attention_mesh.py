"""Attention on meshes of eight devices equals attention on one, values and gradients.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

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


def test_native_declines_a_divided_length() -> None:
    q, k, v = _arrays()
    mesh = make_mesh(MeshConfig(fsdp=1, context=8))
    with (
        use_mesh(mesh),
        pytest.raises(kernels.KernelError, match="divides the length over 8 devices"),
    ):
        kernels.attention(q, k, v, scale=1.0, implementation="native")
