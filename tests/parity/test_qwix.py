"""Qwix's rules give the codes and scales that Qwix gives, and nearly its outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from fornax.quant import quantize
from fornax.quant.array import QuantizedArray

# Qwix calls what this flax deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::qwix", "ignore:.*is deprecated:DeprecationWarning"
)

X = jax.random.normal(jax.random.key(7), (3, 6, 64))


class Model(nnx.Module):
    """What Qwix knows: products, and a convolution where it is asked for."""

    def __init__(self, rngs: nnx.Rngs, *, conv: bool):
        self.lin = nnx.Linear(64, 96, rngs=rngs)
        self.general = nnx.LinearGeneral((96,), (4, 24), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 24), 64, axis=(-2, -1), rngs=rngs)
        self.ein = nnx.Einsum("bti,io->bto", (64, 32), rngs=rngs)
        self.conv = nnx.Conv(32, 16, (3,), rngs=rngs) if conv else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.ein(self.out(nnx.relu(self.general(self.lin(x)))))
        return y if self.conv is None else self.conv(y)


def held(model: nnx.Module) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Codes, scales and zero points by path, of ours."""
    found = {}
    for path, module in nnx.iter_modules(model):
        variable = vars(module).get("kernel")
        value = None if variable is None else variable.get_raw_value()
        if isinstance(value, QuantizedArray):
            zeros = None if value.zeros is None else np.asarray(value.zeros)
            name = "/".join(map(str, path))
            found[name] = np.asarray(value.integers), np.asarray(value.scales), zeros
    return found


@pytest.mark.parametrize(
    ("rule", "conv"),
    [
        ({"weight_qtype": "int8"}, False),
        ({"weight_qtype": jnp.int4}, False),
        ({"weight_qtype": "int3", "tile_size": 8}, False),
        ({"weight_qtype": "int4", "tile_size": 1 / 4}, False),
        ({"weight_qtype": jnp.int4, "weight_calibration_method": "minmax"}, False),
        ({"weight_qtype": "int8", "weight_calibration_method": "rms,7"}, False),
        ({"weight_qtype": "int8", "weight_calibration_method": "absmax,0.8"}, False),
        ({"weight_qtype": "int8", "weight_calibration_method": "fixed,-0.3,0.3"}, False),
        ({"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn}, False),
        ({"weight_qtype": "int8", "act_qtype": "int8"}, True),
    ],
)
def test_codes_and_scales_are_qwixs(rule: dict, conv: bool) -> None:
    rules = [qwix.QuantizationRule(module_path=".*", **rule)]
    ours = Model(nnx.Rngs(3), conv=conv)
    theirs = qwix.quantize_model(Model(nnx.Rngs(3), conv=conv), qwix.PtqProvider(rules), X)
    quantize(ours, rules)
    found = held(ours)
    exact = "weight_calibration_method" not in rule
    assert len(found) == 4 + conv
    for name, (codes, scales, zeros) in found.items():
        wanted = getattr(theirs, name).kernel.array
        wanted = getattr(wanted, "value", wanted)
        scale, values = (np.asarray(x.astype(jnp.float32)) for x in (wanted.scale, wanted.qvalue))
        codes, scales = codes.astype(np.float32), scales.astype(np.float32)
        if exact:
            np.testing.assert_array_equal(scales, scale)
            np.testing.assert_array_equal(codes, values)
            assert wanted.zero_point is None
            continue
        # XLA divides by a constant in one program and multiplies by its inverse in another.
        np.testing.assert_allclose(scales, np.broadcast_to(scale, scales.shape), rtol=3e-7)
        apart = np.abs(codes - values)
        assert apart.max() <= 1
        assert (apart > 0).mean() < 0.002
        if zeros is not None:
            np.testing.assert_array_equal(zeros, np.asarray(wanted.zero_point.astype(jnp.int8)))
    y, their_y = (np.asarray(model(X), np.float32) for model in (ours, theirs))
    assert np.abs(y - their_y).max() < 2e-2 * np.abs(their_y).max()
