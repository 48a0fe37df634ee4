"""Rows exchanged between devices against slices put together in NumPy, and their gradient.

Legend: P devices, N rows held, R rows of the result, D width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh

P, N, R, D, MOST = 4, 12, 20, 3, 5
AXES = ("data", "expert")


def _as_documented(
    x_ND: jax.Array,
    output_RD: jax.Array,
    input_offsets_P: jax.Array,
    send_sizes_P: jax.Array,
    output_offsets_P: jax.Array,
    recv_sizes_P: jax.Array,
    *,
    axis_name: tuple[str, ...],
) -> jax.Array:
    """What `lax.ragged_all_to_all` is documented to do, of collectives that XLA has for CPU."""
    given = (x_ND, input_offsets_P, send_sizes_P, output_offsets_P)
    x_PND, first_PP, sizes_PP, into_PP = (jax.lax.all_gather(one, axis_name) for one in given)
    own, rows_R = jax.lax.axis_index(axis_name), jnp.arange(len(output_RD))
    for source in range(P):
        within_R = rows_R - into_PP[source, own]
        sent_R = (within_R >= 0) & (within_R < sizes_PP[source, own])
        taken_RD = x_PND[source][jnp.where(sent_R, first_PP[source, own] + within_R, 0)]
        output_RD = jnp.where(sent_R[:, None], taken_RD, output_RD)
    return jnp.where(jnp.all(recv_sizes_P == sizes_PP[:, own]), output_RD, jnp.nan)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_each_device_gets_its_rows_in_order(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has no ragged exchange for CPU: its arguments are checked as they are documented."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _as_documented)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, (P, P)).astype(np.int32)
    counts[1], counts[:, 2] = 0, [MOST, 0, 0, 3]
    x, dy = (rng.normal(size=(P, rows, D)).astype(np.float32) for rows in (N, R))
    y, dx = np.zeros_like(dy), np.zeros_like(x)
    for to in range(P):
        filled = 0
        for source in range(P):
            first, size = counts[source, :to].sum(), counts[source, to]
            y[to, filled : filled + size] = x[source, first : first + size]
            dx[source, first : first + size] = dy[to, filled : filled + size]
            filled += size

    def local(x_1ND: jax.Array, dy_1RD: jax.Array) -> tuple[jax.Array, jax.Array]:
        def run(x_ND: jax.Array) -> jax.Array:
            return kernels.exchange_rows(x_ND, jnp.asarray(counts), R, MOST, AXES)

        y_RD, pull = jax.vjp(run, x_1ND[0])
        return y_RD[None], pull(dy_1RD[0])[0][None]

    mesh = make_mesh(MeshConfig(fsdp=1, data=2, expert=2), jax.devices()[:P])
    spec = PartitionSpec(AXES)
    program = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
    )
    with kernels.target_platform(platform):
        found = jax.jit(program)(x, dy)
    np.testing.assert_array_equal(found[0], y)
    np.testing.assert_array_equal(found[1], dx)
