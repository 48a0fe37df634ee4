"""Building the native kernels: without a compiler, damaged, concurrently, and without warnings."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.kernels import _native, attention
from fornax.kernels._native import build, units

_USE = """
import jax.numpy as jnp
from fornax.kernels import _native, attention
reason = _native.unavailable("attention")
assert reason is None, reason
q = jnp.ones((1, 16, 2, 8))
print(float(attention(q, q, q, scale=1.0, implementation="native").sum()))
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has not looked for the kernels yet."""
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_reasons", {})
    build._notice.cache_clear()
    build._announce.cache_clear()
    return tmp_path


def test_without_compiler_falls_back_with_one_notice(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    q = jnp.ones((1, 16, 2, 8))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert attention(q, q, q, scale=1.0).shape == q.shape
    notices = [r.message for r in caplog.records if "native CPU kernels are off" in r.message]
    assert len(notices) == 1
    assert "no C++ compiler" in notices[0]


def test_compiling_is_announced_once_and_a_failure_quotes_the_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no luck" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        for unit in ("attention", "norm"):
            assert "error: no luck" in str(_native.unavailable(unit))
    assert len([r for r in caplog.records if "compiling native CPU kernels" in r.message]) == 1
    assert not list(fresh.glob("native/*/*"))


def test_damaged_library_is_removed(fresh: Path) -> None:
    folder = build._fingerprint(str(_native.compiler()), "attention")
    path = fresh / "native" / folder / "attention.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert "could not be loaded and was removed" in str(_native.unavailable("attention"))
    assert not path.exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 instruction set")
def test_a_processor_without_the_instructions_goes_without_a_notice(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(units, "NATIVE", ("-march=x86-64-v3",))
    with caplog.at_level(logging.WARNING):
        assert "no instructions for it" in str(_native.unavailable("matmul"))
    assert [r.message for r in caplog.records if "native CPU kernels are off" in r.message] == []


@pytest.mark.exhaustive
def test_processes_that_compile_at_once_all_succeed(fresh: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", _USE], stdout=subprocess.PIPE) for _ in range(2)
    ]
    outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [p.name for p in fresh.glob("native/*/*")] == ["attention.so"]


@pytest.mark.slow
@pytest.mark.parametrize("unit", units.UNITS)
def test_compiles_without_warnings_for_plain_and_for_this_processor(unit: str) -> None:
    source = Path(build.__file__).parent / f"{unit}.cc"
    include = ["-isystem", jax.ffi.include_dir()]
    cxx = _native.compiler()
    assert cxx is not None
    command = [cxx, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fsyntax-only"]
    for flags in ([], units.NATIVE):
        done = subprocess.run(
            [*command, *flags, *include, str(source)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


NEON = shutil.which("aarch64-linux-gnu-g++")


@pytest.mark.slow
@pytest.mark.skipif(NEON is None, reason="no compiler for ARM: aarch64-linux-gnu-g++")
@pytest.mark.parametrize("unit", units.UNITS)
def test_compiles_for_neon(unit: str, tmp_path: Path) -> None:
    command = units.compile_command(
        str(NEON), unit, tmp_path / f"{unit}.so", include=jax.ffi.include_dir(), march=()
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_threads_that_ask_at_once_register_one_library(tmp_path: Path) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
from fornax.kernels import _native
with ThreadPoolExecutor(4) as pool:
    print(set(pool.map(_native.unavailable, ["norm"] * 4)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FORNAX_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "{None}\n", done.stderr


_AVX2, _AVX512 = (units.PREBUILT[name][1] for name in ("avx2", "avx512"))


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        pytest.param({"fpu", "sse2"}, None, id="old"),
        pytest.param(_AVX2 - {"xsave"}, None, id="one missing"),
        pytest.param(_AVX2 | {"avx512f"}, "avx2", id="AVX-512 in part"),
        pytest.param(_AVX512, "avx512", id="AVX-512"),
        pytest.param(_AVX512 | {"avx512_bf16"}, "avx512", id="BF16 without VNNI"),
        pytest.param(units.PREBUILT["avx512_bf16"][1] | {"amx_tile"}, "avx512_bf16", id="newest"),
    ],
)
def test_widest_instruction_set_that_the_processor_has_is_chosen(
    features: set[str], chosen: str | None
) -> None:
    assert units.instruction_set(frozenset(features)) == chosen


def test_calls_keep_their_numbers_in_a_loop_beside_a_rotation_of_whole_heads() -> None:
    """An empty slice there made jaxlib 0.12 drop the attributes of all calls."""
    x_BTNH = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))
    angles_BTr = jnp.linspace(-3, 3, 2 * 32 * 8).reshape(2, 32, 8)

    def layer(x_BTNH: jax.Array) -> jax.Array:
        y_BTNH = kernels.rms_norm(x_BTNH, jnp.ones(16), eps=1e-6)
        y_BTNH = kernels.rotary_embedding(
            y_BTNH, jnp.cos(angles_BTr), jnp.sin(angles_BTr), interleaved=True
        )
        return x_BTNH + y_BTNH

    def in_a_loop(x_BTNH: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (layer(x), None), x_BTNH, length=3)[0]

    def unrolled(x_BTNH: jax.Array) -> jax.Array:
        return layer(layer(layer(x_BTNH)))

    found, expected = (
        jax.jit(jax.grad(lambda x, run=run: jnp.sum(jnp.square(run(x)))))(x_BTNH)
        for run in (in_a_loop, unrolled)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
