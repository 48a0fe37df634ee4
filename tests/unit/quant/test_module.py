"""Any quantized NNX module: what it computes, what is refused, and what still works."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tests.cases import one_in

from fornax import adapters, export
from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.export import Spec
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import DecoderConfig, create_decoder
from fornax.quant import QuantizationRule, quantize
from fornax.quant.array import QuantizedArray, QuantizedCodes, QuantizedWeight

ALL = QuantizationRule(weight_qtype="int8")
TOKENS = jnp.arange(20).reshape(2, 10)
LINEAR = "attn/.*|lin|ein|conv"


class Own(nnx.Module):
    """A product by a parameter of its own, and a table that is added."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (48, 64)))
        self.places = nnx.Param(jax.random.normal(rngs.params(), (10, 64)))

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x @ self.w[...].T @ self.w[...], None

        return jax.lax.scan(step, x + self.places[...], None, length=2)[0]


class Both(nnx.Module):
    """One of each kind."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(50, 64, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 64, rngs=rngs, decode=False)
        self.lin = nnx.Linear(64, 64, rngs=rngs)
        self.ein = nnx.Einsum("bti,io->bto", (64, 64), (64,), rngs=rngs)
        self.conv = nnx.Conv(64, 64, (3,), feature_group_count=2, rngs=rngs)
        self.up = nnx.ConvTranspose(64, 32, (3,), rngs=rngs)
        self.down = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attn(self.norm(x))
        return self.down(self.up(self.conv(self.ein(self.lin(x)))))


def both() -> Both:
    return Both(nnx.Rngs(0))


def far(found: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.abs(found - wanted).max() / jnp.abs(wanted).max())


@pytest.mark.parametrize(
    ("rule", "most"),
    one_in(
        2,
        [
            ({"weight_qtype": jnp.int4}, 0.3),
            ({"weight_qtype": "int8"}, 0.02),
            (
                {"weight_qtype": "int4", "tile_size": 16, "module_path": "attn/.*|lin|ein|down"},
                0.25,
            ),
            ({"weight_qtype": "int8", "weight_calibration_method": "minmax"}, 0.02),
            ({"weight_qtype": "int8", "act_qtype": "int8", "module_path": LINEAR}, 0.03),
            ({"weight_qtype": "int8", "weight_calibration_method": "rms,7"}, 0.08),
            (
                {
                    "weight_qtype": "float8_e4m3fn",
                    "act_qtype": "float8_e4m3fn",
                    "module_path": LINEAR,
                },
                0.15,
            ),
        ],
    ),
)
def test_every_kind_of_module_computes_nearly_the_same(rule: dict, most: float) -> None:
    module = both()
    wanted = module(TOKENS)
    report = quantize(module, [QuantizationRule(**rule)])
    found = module(TOKENS)
    assert 0 < far(found, wanted) < most
    # A program of its own sums in another order, and an input near a tie goes to the other code.
    ties = 0.02 if "act_qtype" in rule else 1e-5
    assert far(nnx.jit(lambda m, x: m(x))(module, TOKENS), found) < ties
    assert {"attn/query/kernel", "lin/kernel", "ein/kernel"} <= report.quantized.keys()
    assert report.bytes_after < 0.6 * report.bytes_before
    assert report.kept["norm/scale"] == "one axis: a bias or a scale"
    assert "embed/embedding" in report.kept


def test_reading_a_weight_gives_the_floats_that_its_codes_stand_for() -> None:
    module = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    w = np.asarray(module.kernel[...], np.float64)
    quantize(module, [QuantizationRule(weight_qtype="int4")])
    held = module.kernel.get_raw_value()
    assert isinstance(module.kernel, QuantizedWeight)
    assert held.codes.dtype == jnp.uint8
    assert held.codes.shape == (64, 16)
    step = np.abs(w).max(0) / 7.5
    found = np.asarray(module.kernel[...], np.float64)
    assert (np.abs(found - w) <= (0.5 + 1e-6) * step).all()
    np.testing.assert_allclose(found / step, np.round(found / step), atol=1e-5)
    x = jax.random.normal(jax.random.key(1), (3, 64))
    np.testing.assert_allclose(module(x), np.asarray(x, np.float64) @ found, rtol=1e-4, atol=1e-5)


def test_integers_are_multiplied_as_such() -> None:
    module = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    quantize(module, [QuantizationRule(weight_qtype="int8", act_qtype="int8")])
    assert type(module.kernel) is QuantizedCodes
    graphdef, state = nnx.split(module)
    text = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)).lower(state, jnp.ones((3, 64))).as_text()
    assert "(tensor<3x64xi8>, tensor<64x32xi8>) -> tensor<3x32xi32>" in text


def test_products_of_a_modules_own_code_are_found_by_its_inputs() -> None:
    module, x = Own(nnx.Rngs(0)), jnp.ones((10, 64))
    with pytest.raises(ConfigError, match="give inputs, so that its products are found"):
        quantize(module, [ALL])
    with pytest.raises(
        ConfigError, match=r"finds no weight.*w \(multiplied along different axes\)"
    ):
        quantize(module, [ALL], x)

    class Left(nnx.Module):
        def __init__(self):
            self.w = Own(nnx.Rngs(0)).w
            self.places = Own(nnx.Rngs(0)).places

        def __call__(self, x: jax.Array) -> jax.Array:
            step = jax.checkpoint(lambda x: jnp.einsum("oi,ti->to", self.w[...], x))
            return step(x + self.places[...])

    left = Left()
    wanted = left(x)
    report = quantize(left, [ALL], jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert report.quantized == {"w": "int8, one scale along -1"}
    assert report.kept == {"places": "multiplied by nothing; read by add"}
    assert 0 < far(left(x), wanted) < 0.02


def test_tables_are_quantized_where_a_rule_names_their_operation() -> None:
    module = both()
    wanted = module(TOKENS)
    rules = [ALL, QuantizationRule(op_names=("take",), weight_qtype="int8")]
    report = quantize(module, rules)
    assert report.quantized["embed/embedding"] == "int8, one scale along -1"
    assert 0 < far(module(TOKENS), wanted) < 0.03


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"module_path": "atn/.*", "weight_qtype": "int8"}], "finds no weight of a product.*attn"),
        ([{"module_path": "norm", "weight_qtype": "int8"}], r"it finds norm/bias \(one axis"),
        (
            [{"weight_qtype": "int8"}, {"module_path": "lin", "weight_qtype": "int4"}],
            "by the rules",
        ),
        ([{"weight_qtype": "int9"}], "qtype int9 is none of"),
        ([{"weight_qtype": "bfloat16"}], "qtype bfloat16 is none of"),
        ([{"weight_qtype": "int4", "tile_size": 48}], "does not divide the 64 inputs"),
        ([{"weight_qtype": "int4", "tile_size": 16}], "is for products of matrices"),
        ([{"weight_qtype": "int8", "weight_calibration_method": "rms"}], "must be absmax"),
        ([{"weight_qtype": "int8", "weight_calibration_method": "fixed,1,2"}], "0 in the range"),
        ([{"weight_qtype": "int6", "weight_calibration_method": "minmax"}], "needs zero points"),
        ([{"act_qtype": "int8"}], "act_qtype needs a weight_qtype"),
        ([{"weight_qtype": "int8", "act_qtype": "int8"}], "is for nnx.Linear"),
        ([{"module_path": "(", "weight_qtype": "int8"}], "not a regular expression"),
        ([{"op_names": ("dot",), "weight_qtype": "int8"}], "are none of dot_general"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: list[dict], said: str) -> None:
    module = both()
    with pytest.raises(ConfigError, match=said):
        quantize(module, [QuantizationRule(**rule) for rule in rules])
    assert isinstance(module.lin.kernel, nnx.Param)


def test_a_decoders_layers_are_quantized_in_their_stack() -> None:
    config = DecoderConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4
    )
    model = create_decoder(config, seed=1)
    wanted = model(TOKENS)
    report = quantize(model, [QuantizationRule(module_path="layers/.*", weight_qtype="int8")])
    assert len(report.quantized) == 7
    held = model.layers.mlp.down.kernel.get_raw_value()
    assert isinstance(held, QuantizedArray)
    assert held.scales.shape == (3, 1, 64)
    found = model(TOKENS)
    assert 0 < far(found, wanted) < 0.05


def test_adapters_are_trained_on_top_and_the_codes_are_not() -> None:
    module = both()
    quantize(module, [QuantizationRule(module_path="lin|down", weight_qtype="int8")])
    adapters.attach(module, LoRA(rank=2, targets=("lin", "down")), rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=adapters.LoRAParam)
    codes = np.asarray(module.lin.kernel.get_raw_value().codes)

    def loss(m: Both) -> jax.Array:
        return jnp.mean(m(TOKENS) ** 2)

    before = loss(module)
    for _ in range(3):
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, adapters.LoRAParam))(module)
        optimizer.update(module, grads)
    assert loss(module) < before
    np.testing.assert_array_equal(codes, module.lin.kernel.get_raw_value().codes)


def test_a_bundle_holds_the_codes(tmp_path: Path) -> None:
    module = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    x = np.ones((2, 256), np.float32)
    sizes = {}
    for name in ("float", "int4"):
        if name == "int4":
            quantize(module, [QuantizationRule(weight_qtype="int4", tile_size=32)])
        export.save(
            tmp_path / name,
            {"f": lambda model, x: {"y": model(x)}},
            module,
            inputs={"f": {"x": Spec(("b", 256), "float32")}},
            buckets={"b": [2]},
            platforms=["cpu"],
        )
        files = (tmp_path / name).rglob("*")
        sizes[name] = sum(path.stat().st_size for path in files if path.is_file())
    found = export.load(tmp_path / "int4")["f"](x=x)["y"]
    np.testing.assert_allclose(found, module(x), rtol=1e-5, atol=1e-6)
    assert sizes["int4"] < 0.35 * sizes["float"]


def test_eight_devices_hold_codes_as_they_held_floats() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8))
    module, alone = (nnx.Linear(64, 32, rngs=nnx.Rngs(0)) for _ in range(2))
    divided = NamedSharding(mesh, PartitionSpec("fsdp", None))
    module.kernel.set_value(jax.device_put(module.kernel.get_value(), divided))
    for each in (module, alone):
        quantize(each, [QuantizationRule(weight_qtype="int4", tile_size=8)])
    held, wanted = (each.kernel.get_raw_value() for each in (module, alone))
    for found, one in zip(jax.tree.leaves(held), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(found, one)
    assert held.codes.addressable_shards[0].data.shape == (8, 16)
    x = jnp.ones((4, 64))
    np.testing.assert_allclose(module(x), alone(x), rtol=1e-6, atol=1e-6)
