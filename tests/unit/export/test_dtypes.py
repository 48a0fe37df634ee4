"""Every dtype of the V2 protocol goes through a bundle bit for bit, 64-bit types included."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import Spec
from fornax.export.dtypes import TENSORS, is_wide, numpy_dtype

WIDE = [name for name in TENSORS if is_wide(name)]
NARROW = [name for name in TENSORS if not is_wide(name)]


def mixed(params, **inputs):
    """Something of each dtype that rounds, wraps or flips in that dtype's own way."""
    return {
        f"{name}_out": ~x if x.dtype == bool else x * params[name][0] + params[name][1]
        for name, x in inputs.items()
    }


def params_of(names: list[str]) -> dict[str, np.ndarray]:
    return {name: np.asarray([3, 5], numpy_dtype(name)) for name in names if name != "bool"}


def inputs_of(names: list[str]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    found = {}
    for name in names:
        dtype = numpy_dtype(name)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            found[name] = random.integers(limits.min, limits.max, (3, 2), dtype, endpoint=True)
        else:
            found[name] = np.asarray(random.standard_normal((3, 2)) * 100, dtype)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, export.Loaded]:
    found = {}
    for kind, names in (("narrow", NARROW), ("wide", WIDE)):
        path: Path = tmp_path_factory.mktemp("dtypes") / kind
        specs = {name: Spec(("b", 2), name) for name in names}
        export.save(
            path,
            {"mixed": mixed},
            params_of(names),
            inputs={"mixed": specs},
            buckets={"b": [3]},
            platforms=("cpu",),
        )
        found[kind] = export.load(path)
    return found


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_outputs_equal_jits_bit_for_bit(both, kind):
    names = {"narrow": NARROW, "wide": WIDE}[kind]
    given = inputs_of(names)
    found = both[kind]["mixed"](**given)
    with jax.enable_x64(kind == "wide"):
        expected = jax.jit(mixed)(params_of(names), **given)
        host = {name: np.asarray(value) for name, value in expected.items()}
    for name in names:
        out = found[f"{name}_out"]
        assert out.dtype == numpy_dtype(name)
        assert out.tobytes() == host[f"{name}_out"].tobytes(), name


def test_wide_types_need_nothing_of_the_process_or_its_threads(both):
    """The process has 64-bit types off; threads that run both bundles at once keep their own."""
    assert not jax.config.read("jax_enable_x64")
    wide, narrow = inputs_of(WIDE), inputs_of(NARROW)
    before = {kind: both[kind]["mixed"](**x) for kind, x in (("wide", wide), ("narrow", narrow))}

    def turn(number: int) -> bool:
        kind, given = (("wide", wide), ("narrow", narrow))[number % 2]
        found = both[kind]["mixed"](**given)
        same = all(found[k].tobytes() == v.tobytes() for k, v in before[kind].items())
        return same and jnp.asarray(np.float64(1)).dtype == jnp.float32

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turn, range(64)))


def test_a_process_with_wide_types_runs_a_narrow_bundle_as_it_was(both):
    given = inputs_of(NARROW)
    before = both["narrow"]["mixed"](**given)
    with jax.enable_x64(True):
        fresh = export.load(both["narrow"].bundle.path)["mixed"](**given)
    assert all(fresh[name].tobytes() == value.tobytes() for name, value in before.items())


def test_a_number_past_a_narrower_type_is_no_input(both):
    given = inputs_of(NARROW) | {"int8": [[1, 2], [3, 400], [5, 6]]}
    with pytest.raises(BundleError, match="'int8' of 'mixed' has dtype int64; it takes int8"):
        both["narrow"]["mixed"](**given)


def test_parameters_of_64_bits_stay_so_beside_a_wide_input_only(tmp_path):
    """As jax.jit takes them: numpy's float64 is float32 where 64-bit types are off."""
    third = {"w": np.float64(1) / 3}
    functions = {"wide": lambda p, x: {"y": x * p["w"]}, "narrow": lambda p, z: {"y": z * p["w"]}}
    inputs = {"wide": {"x": Spec((2,), "float64")}, "narrow": {"z": Spec((2,), "float32")}}
    export.save(tmp_path / "both", functions, third, inputs=inputs, platforms=("cpu",))
    both = export.load(tmp_path / "both")
    assert both["wide"](x=[1.0, 2.0])["y"].tolist() == [1 / 3, 2 / 3]
    assert both["narrow"](z=[1.0, 2.0])["y"].dtype == np.float64
    del functions["wide"], inputs["wide"]
    export.save(tmp_path / "one", functions, third, inputs=inputs, platforms=("cpu",))
    assert export.load(tmp_path / "one")["narrow"](z=[1.0, 2.0])["y"].dtype == np.float32
