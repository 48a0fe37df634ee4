"""Optimizer state is sharded as its parameters are, and computes what one device does."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.cases import one_in

from fornax.mesh import use_mesh
from fornax.optim import (
    EMA,
    SOAP,
    Adafactor,
    AdamW,
    AdaptiveClip,
    Group,
    Lookahead,
    Muon,
    NormClip,
    OptimConfig,
    Shampoo,
    build,
)

pytestmark = pytest.mark.usefixtures("optimized")

AXES = {
    "embed": ("vocab", "embed"),
    "layers": {
        "q": ("layers", "embed", "heads", "head_dim"),
        "o": ("layers", "heads", "head_dim", "embed"),
        "scale": ("layers", "norm"),
    },
}
SHAPES = {
    "embed": (32, 16),
    "layers": {"q": (2, 16, 2, 8), "o": (2, 2, 8, 16), "scale": (2, 16)},
}
RULES = {"embed": "fsdp", "heads": "tensor", "vocab": "tensor"}


def is_tuple(node):
    return isinstance(node, tuple)


def make(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_tuple
    )


@pytest.fixture(scope="module")
def shardings():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*(RULES.get(name) for name in axes))),
        AXES,
        is_leaf=is_tuple,
    )


CHAINS = {
    "adamw": OptimConfig(optimizer=AdamW(), ema=EMA()),
    "adafactor": OptimConfig(
        optimizer=Adafactor(min_dim_size_to_factor=8, momentum=0.9), clip=(AdaptiveClip(),)
    ),
    "muon": OptimConfig(optimizer=Muon(), accumulate=2),
    "soap": OptimConfig(
        optimizer=SOAP(precondition_frequency=2),
        lookahead=Lookahead(sync_period=2),
        groups=(Group(pattern="scale", learning_rate_factor=0.5),),
        clip=(NormClip(max_norm=10.0),),
    ),
    "shampoo": OptimConfig(
        optimizer=Shampoo(block_size=8, root_interval=2, start_step=1, matrix_eps=1e-3), clip=()
    ),
}


@pytest.mark.parametrize("name", one_in(2, CHAINS))
def test_sharded_updates_equal_those_of_one_device(name, shardings):
    params = make(0)
    chain = build(CHAINS[name], total_steps=4, params=params, axes=AXES)
    on_mesh = chain.state_shardings(shardings)
    init = jax.jit(chain.init, out_shardings=on_mesh)
    mesh = shardings["embed"].mesh

    def on_the_mesh(*arguments):
        with use_mesh(mesh):
            return chain.update(*arguments)

    step = jax.jit(
        on_the_mesh,
        in_shardings=(shardings, on_mesh, shardings),
        out_shardings=(shardings, on_mesh),
    )
    one_step = jax.jit(chain.update)
    many = jax.device_put(params, shardings)
    state, one, one_state = init(many), params, jax.jit(chain.init)(params)
    for call in range(4):
        grads = make(call + 1)
        many, state = step(jax.device_put(grads, shardings), state, many)
        one, one_state = one_step(grads, one_state, one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), many, one)


def spec_of(tree, ending):
    found = [
        leaf.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jax.tree_util.keystr(path).endswith(ending)
    ]
    assert len(found) == 1, (ending, found)
    return found[0]


@pytest.mark.parametrize(
    ("name", "ending", "spec"),
    [
        ("adamw", ".mu['layers']['q']", (None, "fsdp", "tensor", None)),
        ("adamw", ".average['embed']", ("tensor", "fsdp")),
        ("adamw", "[0][1][0].count", ()),
        ("adafactor", "['layers']['q'][0].v_row", (None, "fsdp")),
        ("adafactor", "['layers']['q'][0].v_col", (None, "tensor")),
        ("adafactor", "['layers']['o'][0].v_row", (None, "tensor")),
        ("adafactor", "['layers']['o'][0].v", ()),
        ("adafactor", "['embed'][0].v_row", ("fsdp",)),
        ("adafactor", "['embed'][0].v_col", ("tensor",)),
        ("adafactor", "['layers']['q'][4].ema", (None, "fsdp", "tensor")),
        ("muon", ".acc_grads['layers']['o']", (None, "tensor", None, "fsdp")),
        ("soap", ".left['layers']['q']", (None, "fsdp", None)),
        ("soap", ".right_basis['layers']['q']", (None, "tensor", None)),
        ("soap", ".right['layers']['o']", (None, "fsdp", None)),
        ("soap", ".slow['embed']", ("tensor", "fsdp")),
        ("shampoo", ".mu['layers']['o']", (None, "tensor", None, "fsdp")),
        ("shampoo", ".left_stats['layers']['q']", (("fsdp", "tensor"), None, None)),
    ],
)
def test_state_is_divided_as_its_parameter(name, ending, spec, shardings):
    chain = build(CHAINS[name], total_steps=4, params=make(0), axes=AXES)
    assert spec_of(chain.state_shardings(shardings), ending) == PartitionSpec(*spec)


@pytest.mark.parametrize("name", CHAINS)
def test_no_large_state_is_left_replicated(name, shardings):
    chain = build(CHAINS[name], total_steps=4, params=make(0), axes=AXES)
    state = jax.eval_shape(chain.init, make(0))
    pairs = zip(
        jax.tree.leaves(state), jax.tree.leaves(chain.state_shardings(shardings)), strict=True
    )
    for leaf, sharding in pairs:
        if leaf.size > 64:
            assert np.prod(sharding.shard_shape(leaf.shape)) < leaf.size, leaf.shape


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_each_device_decomposes_its_share_of_the_matrices(name, shardings):
    """Read from the compiled program: what LAPACK is called with on one of eight devices."""
    axes = {"w": ("layers", "embed", "mlp")}
    where = {"w": NamedSharding(shardings["embed"].mesh, PartitionSpec(None, "fsdp", "tensor"))}
    shapes = {"w": jax.ShapeDtypeStruct((12, 32, 16), np.float32)}
    config = OptimConfig(optimizer={"soap": SOAP(), "shampoo": Shampoo(block_size=16)}[name])
    chain = build(config, total_steps=4, params=shapes, axes=axes)
    on_mesh = chain.state_shardings(where)

    def update(*arguments):
        with use_mesh(where["w"].mesh):
            return chain.update(*arguments)

    jitted = jax.jit(update, in_shardings=(where, on_mesh, where), out_shardings=(where, on_mesh))
    state = jax.eval_shape(chain.init, shapes)
    program = jitted.lower(shapes, state, shapes).compile().as_text()
    found = re.findall(r"= \(?f32\[([\d,]+)\].* custom-call.*lapack_s(?:syevd|geqrf)", program)
    # Twelve layers: 12 sides of 32 and 12 of 16, or two blocks of 16 x 16 with two sides each;
    # evenly over eight devices, filled up with identities.
    wanted = {"soap": ["2,16,16", "2,16,16", "2,32,32", "2,32,32"], "shampoo": ["6,16,16"]}[name]
    assert sorted(found) == wanted
