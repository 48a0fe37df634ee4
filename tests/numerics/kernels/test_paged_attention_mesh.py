"""Paged attention and writes on meshes of several devices equal those on one.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.cases import one_in
from tests.numerics.kernels.paged_codes import DTYPES, pages_of

from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

T, N, H, L, P, S = 12, 8, 16, 2, 9, 4
TABLE = jnp.asarray([[1, 5, 2, 0], [3, 4, 7, 8]], jnp.int32)
SLOTS = jnp.asarray([10, 12, 13, 14, 15, 16, 17, 18, 19, 28, 0, 1], jnp.int32)


def _step(implementation: str, shared: bool = False):
    @jax.jit
    def step(kv: kernels.Pages, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        kv = kernels.paged_write(kv, k, None if shared else v, layer=1, slots_T=SLOTS)
        o = kernels.paged_attention(
            q,
            kv,
            layer=1,
            page_table_RW=TABLE,
            query_start_R1=jnp.asarray([0, 1, 10], jnp.int32),
            context_lens_R=jnp.asarray([11, 9], jnp.int32),
            scale=0.25,
            sinks_N=jnp.arange(N, dtype=jnp.float32),
            shared=shared,
            implementation=implementation,
        )
        return kv, o

    return step


@pytest.mark.parametrize("implementation", ["native", "xla", "reference"])
@pytest.mark.parametrize(
    ("tensor", "k_heads"),
    one_in(3, [(2, 4), (4, 4), (8, 8), (4, 2), (8, 2), (8, 1), (4, 8), (2, 1)]),
)
def test_agrees_with_one_device(tensor: int, k_heads: int, implementation: str) -> None:
    rng = np.random.default_rng(0)
    shapes = [(L, P, S, 2 * k_heads, H), (T, N, H), (T, k_heads, H), (T, k_heads, H)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    expected = _step(implementation)(*arrays)
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=tensor), jax.devices()[:tensor])
    heads = "tensor" if k_heads % tensor == 0 else None
    cache = NamedSharding(mesh, PartitionSpec(None, None, None, heads, None))
    with use_mesh(mesh):
        found = _step(implementation)(jax.device_put(arrays[0], cache), *arrays[1:])
    assert found[0].sharding.is_equivalent_to(cache, 5)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_latent_of_each_device_serves_its_query_heads(implementation: str) -> None:
    """One key head kept once a device, as the engine keeps latents."""
    rng = np.random.default_rng(0)
    shapes = [(L, P, S, 1, H), (T, N, H), (T, 1, H), (T, 1, H)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    kv, o = _step(implementation, shared=True)(*arrays)
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=4), jax.devices()[:4])
    cache = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor", None))
    copies = [np.repeat(x, 4, axis=axis) for x, axis in zip(arrays[::2], (3, 1), strict=True)]
    with use_mesh(mesh):
        found = _step(implementation, shared=True)(
            jax.device_put(copies[0], cache), arrays[1], copies[1], copies[1]
        )
    assert found[0].sharding.is_equivalent_to(cache, 5)
    np.testing.assert_array_equal(found[0], np.repeat(kv, 4, axis=3))
    np.testing.assert_allclose(found[1], o, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("codes", DTYPES)
@pytest.mark.parametrize(("tensor", "k_heads"), [(4, 8), (8, 2)])
def test_scales_are_divided_with_their_heads(
    tensor: int, k_heads: int, codes: str, implementation: str
) -> None:
    rng = np.random.default_rng(0)
    kv = pages_of(rng.normal(size=(L, P, S, 2 * k_heads, H)), codes)
    shapes = [(T, N, H), (T, k_heads, H), (T, k_heads, H)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    expected = _step(implementation)(kv, *arrays)
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=tensor), jax.devices()[:tensor])
    specs = kernels.page_specs(kv, ("tensor",) if k_heads % tensor == 0 else None)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with use_mesh(mesh):
        found = _step(implementation)(jax.device_put(kv, places), *arrays)
    for array, place in zip(jax.tree.leaves(found[0]), jax.tree.leaves(places), strict=True):
        assert array.sharding.is_equivalent_to(place, array.ndim)
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_tpu_kernel_updates_each_devices_heads() -> None:
    rng = np.random.default_rng(0)
    K, width = 4, 128
    shapes = [(L, P, S, 2 * K, width), (T, N, width), (T, K, width), (T, K, width)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    expected = _step("reference")(*arrays)
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2), jax.devices()[:2])
    cache = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor", None))

    @jax.jit
    def update(kv: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        o, kv = kernels.paged_attention_update(
            q,
            k,
            v,
            kv,
            layer=1,
            slots_T=SLOTS,
            page_table_RW=TABLE,
            query_start_R1=jnp.asarray([0, 1, 10], jnp.int32),
            context_lens_R=jnp.asarray([11, 9], jnp.int32),
            scale=0.25,
            sinks_N=jnp.arange(N, dtype=jnp.float32),
            implementation="pallas_tpu",
        )
        return kv, o

    with use_mesh(mesh), kernels.target_platform("tpu", interpret=True):
        found = update(jax.device_put(arrays[0], cache), *arrays[1:])
    assert found[0].sharding.is_equivalent_to(cache, 5)
    np.testing.assert_array_equal(found[0][:, 1:], expected[0][:, 1:])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_heads_that_fit_no_way_are_computed_everywhere() -> None:
    rng = np.random.default_rng(0)
    shapes = [(L, P, S, 6, H), (T, 6, H), (T, 3, H), (T, 3, H)]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    rows = {
        "page_table_RW": jnp.asarray([[1, 2, 3, 0]], jnp.int32),
        "query_start_R1": jnp.asarray([0, T], jnp.int32),
        "context_lens_R": jnp.asarray([T], jnp.int32),
    }

    def attend() -> jax.Array:
        return kernels.paged_attention(arrays[1], arrays[0], layer=0, scale=0.25, **rows)

    expected = attend()
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2), jax.devices()[:2])
    with use_mesh(mesh):
        found = jax.jit(attend)()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
