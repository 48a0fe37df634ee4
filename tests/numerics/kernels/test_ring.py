"""Ring attention over eight devices against the float64 formula on one, values and gradients.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width, V value width.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.hlo import analyse, parse
from fornax.kernels._attention import blockwise, ring
from fornax.kernels._attention.ring import Ring, band_of
from fornax.mesh import (
    MeshConfig,
    balance_ids,
    balance_length,
    make_mesh,
    restore_length,
    use_mesh,
)
from fornax.models.decoder import document_positions


@dataclass(frozen=True)
class Case:
    """One call on one mesh."""

    sizes: dict[str, int] = field(default_factory=lambda: {"context": 4})
    B: int = 2
    T: int = 32
    N: int = 4
    K: int = 2
    H: int = 8
    V: int = 8
    packed: bool = True
    sinks: bool = False
    balanced: bool = True
    consecutive: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "causal": Case(packed=False),
    "all at once": Case(sinks=True, options={"window": 9, "softcap": 2.0}),
    "in order": Case(balanced=False, sinks=True),
    "a window in order": Case(balanced=False, options={"window": 5}),
    "not causal": Case(options={"causal": False}),
    "a window on both sides": Case(options={"causal": False, "window": 6}),
    "positions that are not indexes": Case(consecutive=False, options={"window": 9}),
    "latent": Case(N=4, K=4, H=12, V=8),
    "eight devices": Case(sizes={"context": 8}, K=1, sinks=True),
    "one token per device": Case(sizes={"context": 8}, T=8, balanced=False),
    "tensor": Case(sizes={"context": 2, "tensor": 2, "data": 2}, sinks=True),
    "heads that do not divide": Case(sizes={"context": 2, "tensor": 4}, N=6, K=3, sinks=True),
    "rows that do not divide": Case(
        sizes={"context": 4, "data": 2}, B=3, sinks=True, balanced=False
    ),
}
IN_CI = [("all at once", "native"), ("tensor", "xla")]


def _inputs(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    B, T, N, K = case.B, case.T, case.N, case.K
    shapes = {"q": (B, T, N, case.H), "k": (B, T, K, case.H), "v": (B, T, K, case.V)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return arrays | ({"sinks": rng.normal(size=N)} if case.sinks else {})


def _ids(case: Case) -> tuple[jax.Array, jax.Array]:
    """Segments that cross the borders of devices, padding at either end; and positions."""
    ids_BT = np.ones((case.B, case.T), np.int32)
    if case.packed:
        first, second = case.T // 3 + 1, case.T - 3
        ids_BT[:, first:], ids_BT[:, second:] = 2, 0
        ids_BT[0, : case.T // 8] = 0
    found_BT = jnp.asarray(ids_BT)
    return found_BT, document_positions(ids_BT.shape, found_BT)


def _weighed(case: Case, dtype: Any, ordered: bool, implementation: str, arrays: Any) -> Any:
    ids, positions = _ids(case)
    q, k, v = (arrays[name] for name in "qkv")
    if ordered:
        ids, positions = balance_ids(ids), balance_ids(positions)
        q, k, v = (
            balance_length(x.reshape(case.B, case.T, -1)).reshape(x.shape) for x in (q, k, v)
        )
    o = kernels.attention(
        *(q, k, v),
        scale=0.3,
        positions_q_BT=positions,
        positions_k_BS=positions,
        segment_ids_q_BT=ids,
        segment_ids_k_BS=ids,
        sinks_N=arrays.get("sinks"),
        consecutive=case.consecutive,
        balanced=ordered,
        implementation=implementation,
        **case.options,
    )
    if ordered:
        o = restore_length(o.reshape(case.B, case.T, -1)).reshape(o.shape)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=o.shape), dtype)
    return jnp.sum(jnp.sin(o) * weights), o


def _run(case: Case, dtype: Any, ordered: bool, implementation: str) -> dict[str, np.ndarray]:
    arrays = {name: jnp.asarray(x, dtype) for name, x in _inputs(case).items()}
    weighed = functools.partial(_weighed, case, dtype, ordered, implementation)
    grads, o = jax.jit(jax.grad(weighed, has_aux=True))(arrays)
    return {"o": np.float64(o), **{name: np.float64(g) for name, g in grads.items()}}


@functools.cache
def _expected(name: str) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return _run(CASES[name], jnp.float64, False, "reference")


def _mesh(sizes: dict[str, int]) -> Any:
    count = int(np.prod(list(sizes.values())))
    return make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:count])


@pytest.mark.parametrize(
    ("name", "products"),
    [
        pytest.param(*both, marks=() if both in IN_CI else pytest.mark.exhaustive)
        for both in ((name, products) for name in CASES for products in ("native", "xla"))
    ],
)
def test_values_and_gradients_are_those_of_the_formula(
    name: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if products == "xla":
        monkeypatch.setattr(ring, "runs_native", lambda platform, dtype: False)
        monkeypatch.setattr(blockwise, "BLOCK", 4)
    with use_mesh(_mesh(case.sizes)):
        found = _run(case, jnp.float32, case.balanced, "ring")
    for key, value in _expected(name).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("products", ["native", "xla"])
def test_bfloat16_agrees_to_its_precision(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["all at once"]
    if products == "xla":
        monkeypatch.setattr(ring, "runs_native", lambda platform, dtype: False)
    with use_mesh(_mesh(case.sizes)):
        found = _run(case, jnp.bfloat16, True, "ring")
    for key, value in _expected("all at once").items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[key] / scale, value / scale, atol=3e-2, err_msg=key)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("window", [None, 1, 20, 100, 1000])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_visible_pair_is_met_once_and_few_others(
    devices: int, window: int | None, balanced: bool
) -> None:
    """Of whole rows of indexes; and keys stop nowhere where nobody sees one."""
    band = band_of(causal=True, window=window, consecutive=True)
    made = Ring(devices=devices, balanced=balanced, band=band, tokens=96, native=True)
    T = devices * 96
    met = np.zeros((T, T), int)
    for hop in made.hops:
        assert (hop.pairs[:, :, 2].sum(axis=1) > 0).any()
        for device, pairs in enumerate(hop.pairs):
            home = (device - hop.shift) % devices
            for a, b, there in pairs:
                q, k = made.starts[device, a], made.starts[home, b]
                met[q : q + made.size, k : k + made.size] += there
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    seen = (distance >= 0) & (distance < (window or T))
    assert met.max() == 1
    assert met[seen].all()
    blocks = met.reshape(T // made.size, made.size, -1, made.size).any(axis=(1, 3))
    assert (blocks <= seen.reshape(T // made.size, made.size, -1, made.size).any((1, 3))).all()


def test_a_short_window_needs_neighbours_alone() -> None:
    band = band_of(causal=True, window=1024, consecutive=True)
    for balanced, shifts in ((False, [0, 1]), (True, [0, 1, 15])):
        made = Ring(devices=16, balanced=balanced, band=band, tokens=8192, native=False)
        assert [hop.shift for hop in made.hops] == shifts


def _compiled(devices: int, T: int, dtype: str = "float32") -> Any:
    """A compiled program of XLA's products: gradients of one row in balanced order."""
    mesh = _mesh({"context": devices})
    case = Case(B=1, T=T, N=2, K=1, packed=False)
    ids = jnp.zeros((1, T), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        o = kernels.attention(
            *(q, k, v),
            scale=0.3,
            positions_q_BT=ids,
            positions_k_BS=ids,
            consecutive=True,
            balanced=True,
            implementation="ring",
        )
        return jnp.sum(o.astype(jnp.float32))

    length = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
    arrays = [
        jax.ShapeDtypeStruct((1, T, heads, 8), dtype, sharding=length)
        for heads in (case.N, case.K, case.K)
    ]
    with kernels.target_platform("gpu"), use_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays)
    text = lowered.compile().as_text()
    assert text is not None
    return analyse(parse(text), dict(mesh.shape))


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_device_has_its_share_of_the_work_and_gathers_nothing(devices: int) -> None:
    """Seven products of width 8 for each visible pair of tokens, in the compiled program."""
    T = devices * 2048
    found = _compiled(devices, T)
    ideal = 2 * (T * T / 2) * 2 * 8 * 7 / devices
    assert ideal <= found.flops <= 1.1 * ideal
    kinds = {each.kind for each in found.collectives if each.axes}
    assert kinds == {"collective-permute"}
