"""Programs compiled ahead of time: used when trusted and made for this machine, else compiled."""

import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import Spec, manifest, reading
from fornax.mesh.compilation import machine_key


def double(params, x):
    """`x` times the one parameter."""
    return {"y": x * params["k"]}


def save(path: Path, **options) -> Path:
    export.save(
        path,
        {"double": double},
        {"k": np.float32(2)},
        inputs={"double": {"x": Spec(("b", 3), "float32")}},
        buckets={"b": [1, 2]},
        **options,
    )
    return path


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("ahead") / "m", platforms=("cpu",), executables=True)


def run(loaded: export.Loaded) -> bool:
    """Call the function once; whether its program came with the bundle."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(loaded["double"](x=x)["y"], 2 * x)
    return loaded["double"].program({"b": 2}).ahead


def test_native_code_runs_only_when_it_is_trusted(ahead):
    assert not run(export.load(ahead))
    assert run(export.load(ahead, trust_executables=True))


@pytest.fixture
def cache(tmp_path):
    """JAX's compilation cache, of this test alone."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_code_is_compiled_anew_whatever_the_cache_holds(cache, tmp_path):
    """What comes from jax's cache cannot be written down again."""
    export.load(save(tmp_path / "a", platforms=("cpu",)))["double"].program({"b": 2})
    assert list(cache.iterdir())
    again = save(tmp_path / "b", platforms=("cpu",), executables=True)
    assert run(export.load(again, trust_executables=True))
    count = len(list(cache.iterdir()))
    export.load(again)["double"](x=np.zeros((1, 3), np.float32))
    jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert len(list(cache.iterdir())) > count  # the cache is in use again


def test_code_for_another_machine_is_left_alone_and_said_to_be(ahead, monkeypatch, caplog):
    here = machine_key(export.OneDevice().devices[0])
    monkeypatch.setattr(
        "fornax.export.executables.machine_key", lambda device: here | {"jaxlib": "9.9.9"}
    )
    with caplog.at_level(logging.WARNING):
        assert not run(export.load(ahead, trust_executables=True))
    assert "double {'b': 2} is compiled: the bundle's executable was made for another jaxlib" in (
        caplog.text
    )


def test_code_that_does_not_load_is_compiled_instead(ahead, tmp_path, caplog):
    bundle = export.open_bundle(ahead, trust_executables=True)
    weights = bundle.load_weights()
    bundle.read = lambda name: (ahead / name).read_bytes()[: 100 if "bin" in name else None]
    with caplog.at_level(logging.WARNING):
        program = bundle.compile("double", {"b": 1}, weights)
    assert not program.ahead
    assert "its executable does not load" in caplog.text


def test_altered_code_is_refused_before_it_is_loaded(ahead, tmp_path):
    copy = save(tmp_path / "m", platforms=("cpu",), executables=True)
    file = next((copy / "executables").rglob("*.1.bin"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"double\.1\.bin was altered"):
        export.load(copy, trust_executables=True)


def test_an_executable_of_no_bucket_is_no_part_of_a_manifest(ahead, tmp_path):
    body = json.loads((ahead / "manifest.json").read_text())
    body["executables"][0]["dims"] = {"b": 3}
    body["seal"] = manifest.seal(body)
    with pytest.raises(BundleError, match="none of the function's buckets"):
        reading.from_json(json.dumps(body).encode(), "manifest.json")


def test_a_machine_of_another_platform_makes_none(tmp_path):
    with pytest.raises(BundleError, match="compiles for this machine, which is cpu"):
        save(tmp_path / "m", platforms=("tpu",), executables=True)
