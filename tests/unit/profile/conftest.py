"""A cache folder in which this machine's CPU is measured already."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fornax.mesh.hardware import cpu

FLOPS, BANDWIDTH = 1e11, 1e10


@pytest.fixture(scope="module")
def measured_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """FLOP/s of all of the CPU, and bytes/s, are round figures."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "plans").mkdir()
    told = {"flops": {"float32": FLOPS, "bfloat16": FLOPS}, "bandwidth": BANDWIDTH}
    (folder / "plans" / "cpu.json").write_text(json.dumps({**told, "key": cpu._key()}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORNAX_CACHE_DIR", str(folder))
        yield folder
