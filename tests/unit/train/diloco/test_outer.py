"""The outer step of DiLoCo against float64 numpy, on one device and on eight."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.train.diloco import DilocoConfig, OuterOptimizer
from fornax.train.session import Programs

LAYERS = 3


def parameters(programs: Programs, seed: int) -> Any:
    """Random parameters, laid out as the model's."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.device_put(rng.standard_normal(leaf.shape, np.float32), leaf.sharding),
        programs.abstract.params,
    )


def in_fragment(path: Any, leaf: np.ndarray, fragment: int, count: int) -> np.ndarray:
    """Where a parameter belongs to a fragment, told by its name.

    Of three layers the second fragment has one, so it gets the whole arrays.
    """
    if "layers" in jax.tree_util.keystr(path):
        layer = np.arange(LAYERS).reshape(-1, *(1,) * (leaf.ndim - 1))
        return np.broadcast_to(layer % count == fragment, leaf.shape)
    return np.full(leaf.shape, fragment == count - 1)


@pytest.mark.parametrize(
    ("mesh", "momentum"),
    [({"fsdp": 1}, 0.0), ({"fsdp": 4, "tensor": 2}, 0.9)],
    ids=["one", "eight"],
)
def test_outer_steps_are_those_of_the_papers(laid: Any, mesh: dict[str, int], momentum: float):
    """Three rounds over two fragments, three slices of which one is absent in the second."""
    count, rate, alpha = 2, 0.7, 0.25
    programs = laid(jax.devices()[: np.prod([*mesh.values()])], **mesh)
    config = DilocoConfig(
        sync_every=4, num_fragments=count, outer_learning_rate=rate, outer_momentum=momentum
    )
    optimizer = OuterOptimizer(config, programs.parts, programs.abstract.params)
    start = parameters(programs, 0)
    slices = [parameters(programs, number) for number in (1, 2, 3)]
    outer = optimizer.init(start)
    copy = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)  # noqa: E731
    theta, own = copy(start), [copy(tree) for tree in slices]
    velocity = jax.tree.map(np.zeros_like, theta)
    for fragment, members in ((0, [0, 1, 2]), (1, [0, 2]), (0, [0, 1, 2])):
        sent = [optimizer.contribution(outer, tree, fragment) for tree in slices]
        zeros = jnp.zeros_like(sent[0])
        gathered = jnp.stack([each if n in members else zeros for n, each in enumerate(sent)])
        weights = jnp.array([float(n in members) for n in range(3)])
        outer, slices[0] = optimizer.apply(outer, slices[0], fragment, gathered, weights, alpha)

        def mean(path: Any, whole: Any, *each: Any, f: int = fragment, m: Any = members) -> Any:
            inside = in_fragment(path, whole, f, count)
            return np.where(inside, whole - np.mean([each[n] for n in m], axis=0), 0)

        change = jax.tree_util.tree_map_with_path(mean, theta, *own)
        inside = jax.tree_util.tree_map_with_path(
            lambda path, leaf, f=fragment: in_fragment(path, leaf, f, count), theta
        )
        velocity = jax.tree.map(
            lambda v, d, i: np.where(i, momentum * v + d, v), velocity, change, inside
        )
        theta = jax.tree.map(
            lambda x, v, d, i: np.where(i, x - rate * (d + momentum * v), x),
            *(theta, velocity, change, inside),
        )
        own[0] = jax.tree.map(
            lambda y, x, i: np.where(i, alpha * y + (1 - alpha) * x, y), own[0], theta, inside
        )
    common = optimizer.common(outer, slices[0])
    for got, want in ((common, theta), (slices[0], own[0])):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "e3m0"])
def test_eight_devices_send_what_one_does(laid: Any, dtype: Any):
    """So that the bytes, and what is made of them, are the same on any mesh."""
    config = DilocoConfig(sync_every=3, num_fragments=3, exchange_dtype=dtype)
    sent = []
    for devices, mesh in ((1, {}), (8, {"data": 2, "fsdp": 4})):
        programs = laid(jax.devices()[:devices], **mesh)
        optimizer = OuterOptimizer(config, programs.parts, programs.abstract.params)
        outer = optimizer.init(parameters(programs, 0))
        sent.append(np.asarray(optimizer.contribution(outer, parameters(programs, 1), 1)))
    shorter = min(len(rows) for rows in sent)
    np.testing.assert_array_equal(sent[0][:shorter], sent[1][:shorter])
    assert not sent[1][shorter:].any()


def test_the_state_shares_no_memory_with_the_parameters(laid: Any):
    programs = laid(jax.devices()[:1], fsdp=1)
    optimizer = OuterOptimizer(DilocoConfig(), programs.parts, programs.abstract.params)
    params = parameters(programs, 0)
    outer = optimizer.init(params)
    kept = jax.tree.map(np.array, outer)
    common = optimizer.common(outer, params)
    for tree in (params, common):
        for leaf in jax.tree.leaves(tree):
            leaf.delete()
    jax.tree.map(np.testing.assert_array_equal, outer, kept)


def test_a_state_laid_out_as_it_says(laid: Any):
    programs = laid(jax.devices(), fsdp=4, tensor=2)
    config = DilocoConfig(sync_every=2, num_fragments=2)
    optimizer = OuterOptimizer(config, programs.parts, programs.abstract.params)
    outer = optimizer.init(parameters(programs, 0))
    same = jax.tree.map(
        lambda x, y: (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding),
        outer,
        optimizer.abstract(),
    )
    assert all(jax.tree.leaves(same))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(outer))
