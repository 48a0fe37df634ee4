"""The wheel with compiled kernels: built, and used without a compiler, as lesser processors do."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fornax.kernels._native import build, units

_ROOT = Path(__file__).parents[2]
_USE = """
import sys
from fornax.kernels._native import build, units
if sys.argv[1]:
    features = build._features()
    build._features = lambda: features & units.PREBUILT[sys.argv[1]][1]
import jax.numpy as jnp, numpy as np
from fornax import kernels
for unit in units.UNITS:
    assert kernels._native.unavailable(unit) is None
    print(kernels._native.library_path(unit))
rng = np.random.default_rng(0)
w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((96, 70), (5, 96)))
y = kernels.pack(w, precision="float32", implementation="native").linear(x)
exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
assert np.abs(y - exact).max() < 1e-5 * np.abs(exact).max()
"""

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the built wheel is unpacked into, as pip does."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(out), str(_ROOT)]
    switch = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1"}
    subprocess.run(command, env=os.environ | switch, check=True, timeout=600)
    (wheel,) = out.glob("*.whl")
    assert wheel.name.endswith("py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def _printed(program: str, *words: str, installed: Path, cache: Path) -> str:
    """What a program that has the wheel, and no compiler, prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={"PYTHONPATH": str(installed), "PATH": "", "FORNAX_CACHE_DIR": str(cache)}
        | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["", *units.PREBUILT])
def test_wheel_runs_without_a_compiler(name: str, installed: Path, tmp_path: Path) -> None:
    if name and not units.PREBUILT[name][1] <= build._features():
        pytest.skip(f"this processor cannot run code compiled for {name}")
    printed = _printed(_USE, name, installed=installed, cache=tmp_path)
    chosen = name or units.instruction_set(build._features())
    folder = installed / "fornax/kernels/_native/prebuilt" / str(chosen)
    assert printed.split() == [str(folder / f"{unit}.so") for unit in units.UNITS]
    assert not list(tmp_path.glob("native/*"))


def test_wheel_brings_the_allocator(installed: Path, tmp_path: Path) -> None:
    program = "from fornax.config.allocation import training_memory as m; print(m()['LD_PRELOAD'])"
    printed = _printed(program, installed=installed, cache=tmp_path)
    library = installed / "fornax/config/caching_allocator.so"
    assert printed.strip() == str(library)
    assert library.exists()
    assert not list(tmp_path.glob("native/*"))
