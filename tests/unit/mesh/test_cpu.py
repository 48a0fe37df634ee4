"""This machine's CPU as a chip: measured once, kept, shared by virtual devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from fornax.config.errors import FornaxError
from fornax.mesh.hardware import cpu


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans" / "cpu.json"


@pytest.mark.slow
def test_figures_are_measured_once_and_make_sense(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cpu.cpu_chip()
    assert 1e9 < whole.peak("float32") < 1e14
    assert 1e8 < whole.memory_bandwidth < 1e13
    assert 2**28 < whole.usable_bytes < whole.memory_bytes

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(cpu, "WorkerProcess", refuse)
    eighth = cpu.cpu_chip(8)
    assert eighth.peak() == pytest.approx(whole.peak() / 8)
    assert eighth.memory_bytes == pytest.approx(whole.memory_bytes / 8)
    told = json.loads(cache.read_text())
    for damaged in ({**told, "key": {"processor": "another"}}, {**told, "flops": {}}, []):
        cache.write_text(json.dumps(damaged))
        with pytest.raises(AssertionError, match="measured again"):
            cpu.cpu_chip()


def test_a_measurement_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise SystemExit('no jax here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FornaxError, match="measuring this CPU failed: no jax here"):
        cpu.cpu_chip()
