"""What a function takes first is taken apart into named arrays, and nothing of it is lost."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from fornax.config.errors import BundleError
from fornax.export.modules import take_apart


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        named = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False
        )
        self.first = nnx.Linear(4, 6, kernel_init=named, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(6, 2, rngs=rngs)])
        self.tied = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest[0](self.dropout(self.norm(self.first(x)))) + self.tied.sum()


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def test_a_module_is_its_variables_each_once_with_their_axes():
    parts = take_apart(Net(nnx.Rngs(0)))
    assert list(parts.params) == [
        *("first/bias", "first/kernel", "norm/bias", "norm/mean", "norm/scale", "norm/var"),
        *("rest/0/bias", "rest/0/kernel"),
    ]
    assert parts.axes == {"first/kernel": ("embed", "mlp")}


def test_a_module_rebuilt_computes_the_same():
    net = Net(nnx.Rngs(0))
    net.eval()
    parts = take_apart(net)
    bound = jax.jit(parts.bind(lambda model, x: {"y": model(x)}, "f"))
    expected = jax.jit(lambda model, x: model(x))(net, X)
    np.testing.assert_array_equal(bound(parts.params, x=X)["y"], expected)


def test_a_function_that_changes_state_is_refused_by_the_name_of_what_it_changes():
    parts = take_apart(Net(nnx.Rngs(0)))
    bound = parts.bind(lambda model, x: {"y": model(x)}, "f")
    with pytest.raises(BundleError, match=r"'f' changes dropout/rngs/count, norm/mean, norm/var"):
        jax.eval_shape(bound, parts.params, x=X)


def test_a_module_within_a_pytree_has_the_path_as_its_prefix():
    net = Net(nnx.Rngs(0))
    net.eval()
    parts = take_apart({"encoder": net, "scale": np.float32(2), "times": 3})
    assert "encoder/rest/0/kernel" in parts.params
    assert "scale" in parts.params
    assert "times" not in parts.params  # a Python number stays one

    def run(params, x):
        return {"y": params["encoder"](x) * params["scale"] * params["times"]}

    expected = 6 * np.asarray(net(X))
    np.testing.assert_allclose(parts.bind(run, "f")(parts.params, x=X)["y"], expected, rtol=1e-6)


def test_linen_variables_keep_their_boxes_and_axes():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    net = nn.Dense(2, kernel_init=init)
    variables = net.init(jax.random.key(0), X)
    parts = take_apart(variables)
    assert list(parts.params) == ["params/bias", "params/kernel"]
    assert parts.axes == {"params/kernel": ("embed", "mlp")}
    found = parts.bind(lambda v, x: {"y": net.apply(v, x)}, "f")(parts.params, x=X)["y"]
    np.testing.assert_array_equal(found, net.apply(variables, X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix's own
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_module_quantized_by_qwix_keeps_its_few_bits(bits):
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    rule = qwix.QuantizationRule(module_path=".*", weight_qtype=bits)
    net = qwix.quantize_model(Plain(nnx.Rngs(0)), qwix.PtqProvider([rule]), X)
    parts = take_apart(net)
    assert parts.params["linear/kernel/array/qvalue"].dtype.name == bits
    found = parts.bind(lambda model, x: {"y": model(x)}, "f")(parts.params, x=X)["y"]
    np.testing.assert_array_equal(found, net(X))


def test_a_random_key_is_held_as_its_data():
    parts = take_apart({"key": jax.random.key(7)})
    assert parts.params["key"].dtype == jnp.uint32
    drawn = parts.bind(lambda p: jax.random.normal(p["key"], (3,)), "f")(parts.params)
    np.testing.assert_array_equal(drawn, jax.random.normal(jax.random.key(7), (3,)))


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"a": "text"}, "parameter 'a' is a str"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, "two parameters are named 'a/b'"),
    ],
)
def test_what_is_no_table_of_arrays_is_refused(params, reason):
    with pytest.raises(BundleError, match=reason):
        take_apart(params)
