"""Executables as bytes: jax is given one in place of compiling, by private parts of its own."""

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as jax_cache
from jax.experimental.compilation_cache import compilation_cache

from fornax.mesh.compilation import compile_as, compiled_anew, program_key


def lowered(scale: float = 3.0) -> jax.stages.Lowered:
    def function(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x.T) * scale

    return jax.jit(function).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))


def devices() -> np.ndarray:
    return np.array(jax.devices()[:1])


@pytest.fixture(params=[True, False], ids=["with jax's cache", "without"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    names = {
        "jax_compilation_cache_dir": str(tmp_path / "cache") if request.param else None,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def test_an_image_runs_as_what_it_was_made_of(cache: Path):
    compiled, made = compile_as(lowered(), None)
    assert not made.loaded
    assert made.image is not None
    jax.clear_caches()
    loaded, again = compile_as(lowered(), made.image)
    assert again.loaded
    assert again.image is made.image
    np.testing.assert_array_equal(loaded(X), compiled(X))
    for name in ("_cache", "_cache_used"):
        assert not isinstance(getattr(jax_cache, name), type(made))


def test_jaxs_own_cache_is_read_and_its_image_is_good_elsewhere(cache: Path):
    """Bytes as the cache holds them: an executable that it gave cannot be serialized again."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        pytest.skip("there is none")
    compiled, _ = compile_as(lowered(), None)
    jax.clear_caches()
    _, found = compile_as(lowered(), None)
    assert found.loaded
    jax.clear_caches()
    with compiled_anew(True):
        loaded, made = compile_as(lowered(), found.image)
    assert made.loaded
    np.testing.assert_array_equal(loaded(X), compiled(X))
    jax.clear_caches()
    _, fresh = compile_as(lowered(), None, anew=True)
    assert not fresh.loaded


def test_an_image_that_does_not_load_is_compiled(cache: Path):
    """And what results is jax's newest, where this process is the one that keeps it."""
    compiled, made = compile_as(lowered(), b"no image at all")
    assert not made.loaded
    np.testing.assert_allclose(compiled(X), np.sin(X @ X.T) * 3.0, atol=1e-5)
    jax.clear_caches()
    _, again = compile_as(lowered(), made.image)
    assert again.loaded


def test_programs_of_other_threads_are_their_own(monkeypatch: pytest.MonkeyPatch):
    """A thread that compiles at that moment must not be given this program."""
    _, made = compile_as(lowered(), None)
    jax.clear_caches()
    inside = lowered()
    found: list[Any] = []

    class Slow:
        def compile(self) -> jax.stages.Compiled:
            thread = threading.Thread(
                target=lambda: found.append(jax.jit(lambda x: x + 41)(np.float32(1)))
            )
            thread.start()
            thread.join()
            return inside.compile()

    loaded, again = compile_as(Slow(), made.image)  # pyrefly: ignore[bad-argument-type]
    assert again.loaded
    assert found == [42]
    np.testing.assert_allclose(loaded(X), np.sin(X @ X.T) * 3.0, atol=1e-5)


def test_the_key_is_the_programs_and_the_devices(monkeypatch: pytest.MonkeyPatch):
    key = program_key(lowered(), devices())
    jax.clear_caches()
    assert program_key(lowered(), devices()) == key
    assert program_key(lowered(2.0), devices()) != key
    assert program_key(lowered(), np.array(jax.devices()[1:2])) != key
    monkeypatch.setattr("fornax.mesh.compilation._processor", lambda: "another")
    assert program_key(lowered(), devices()) != key
