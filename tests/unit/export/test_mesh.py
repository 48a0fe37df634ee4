"""A bundle laid on eight devices by its axes computes what it computes on one."""

import jax
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import PartitionSpec

from fornax import export
from fornax.config.errors import BundleError, ShardingError
from fornax.export import Spec


class Tower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = rngs.params.normal((32, 16))
        self.table = nnx.Param(table, axes=("vocab", "embed"))
        self.up = nnx.Param(rngs.params.normal((16, 24)), axes=("embed", "mlp"))
        self.out = nnx.Linear(24, 8, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.out(jax.nn.relu(self.table[ids] @ self.up[...]))


IDS = np.arange(12, dtype=np.int32).reshape(6, 2)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "tower"
    export.save(
        path,
        {"embed": lambda tower, ids: {"y": tower(ids).sum(axis=1)}},
        Tower(nnx.Rngs(0)),
        inputs={"embed": {"ids": Spec(("b", 2), "int32", high=32)}},
        buckets={"b": [1, 8]},
        axes={"out/*": ("mlp",), "out/kernel": ("mlp", "tensor")},
        platforms=("cpu",),
    )
    return path


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"))


def test_weights_lie_where_their_axes_say_and_outputs_are_the_same(bundle, mesh):
    one = export.load(bundle)["embed"]
    laid = export.load(bundle, mesh=mesh, rules={"mlp": ("data",), "vocab": ("tensor", "data")})
    params = laid.weights.params
    assert {name: array.sharding.spec for name, array in params.items()} == {
        "table": PartitionSpec(("tensor", "data"), None),  # no axis "fsdp" here
        "up": PartitionSpec(None, ("data",)),
        "out/kernel": PartitionSpec(("data",), ("tensor",)),
        "out/bias": PartitionSpec(("data",)),
    }
    expected = one(ids=IDS)["y"]
    np.testing.assert_allclose(laid["embed"](ids=IDS)["y"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        laid["embed"](ids=IDS[:1])["y"], expected[:1], rtol=1e-5, atol=1e-5
    )  # one row does not divide over two: replicated


def test_what_cannot_be_laid_is_refused_by_name(bundle, mesh):
    three = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("tensor",))
    with pytest.raises(ShardingError, match=r"weight out/kernel: .* size 8 .*does not divide"):
        export.load(bundle, mesh=three, rules={"mlp": (), "vocab": ()})
    with pytest.raises(BundleError, match="rules lay a bundle on a mesh"):
        export.load(bundle, rules={"mlp": ("data",)})


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"down/*": ("mlp",)}, r"axes names 'down/\*', which no parameter matches"),
        ({"w": ("mlp", None)}, r"'w' of shape \(3,\) has the axes"),
    ],
)
def test_axes_that_fit_no_weight_are_refused(tmp_path, axes, reason):
    with pytest.raises(BundleError, match=reason):
        export.save(
            tmp_path / "x",
            {"f": lambda params, x: {"y": x * params["w"].sum()}},
            {"w": np.ones(3, np.float32)},
            inputs={"f": {"x": Spec((3,), "float32")}},
            axes=axes,
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix's own
def test_a_model_quantized_by_qwix_is_sealed_with_its_few_bits(tmp_path):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 6, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    rule = qwix.QuantizationRule(module_path=".*", weight_qtype="int4")
    net = qwix.quantize_model(Net(nnx.Rngs(0)), qwix.PtqProvider([rule]), x)
    manifest = export.save(
        tmp_path / "few",
        {"f": lambda model, x: {"y": model(x)}},
        net,
        inputs={"f": {"x": Spec(("b", 4), "float32")}},
        buckets={"b": [2]},
        platforms=("cpu",),
        check=False,
    )
    assert manifest.weights["linear/kernel/array/qvalue"].dtype == "int4"
    graph, state = nnx.split(net)
    expected = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(export.load(tmp_path / "few")["f"](x=x)["y"], expected)
