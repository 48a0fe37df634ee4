"""Bundles whose hashes are right and whose contents are not: refused or read, never a crash."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import manifest

_CASES = 25


def damaged(file: Path, seed: int) -> bytes:
    """A file's bytes with some of them changed, at times cut short."""
    pick = random.Random(seed)
    data = bytearray(file.read_bytes())
    for _ in range(pick.choice([1, 2, 8])):
        data[pick.randrange(len(data))] = pick.randrange(256)
    return bytes(data[: pick.randrange(len(data))] if pick.random() < 0.2 else data)


def load_damaged(source: Path, work: Path, kind: str) -> None:
    """Damage one file of that kind after another and load the bundle, sealed again by an enemy."""
    for seed in range(_CASES):
        root = work / f"{kind}-{seed}"
        shutil.copytree(source, root)
        files = sorted(p for p in root.rglob("*") if kind in str(p.relative_to(root)))
        file = random.Random(seed).choice([p for p in files if p.is_file()])
        data = damaged(file, seed)
        file.write_bytes(data)
        body = json.loads((root / "manifest.json").read_text())
        name = str(file.relative_to(root))
        body["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        body["seal"] = manifest.seal(body)
        (root / "manifest.json").write_text(json.dumps(body))
        with contextlib.suppress(BundleError):
            export.load(root)
        shutil.rmtree(root)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["cpu.mlir", "weights", "golden"])
def test_damage_under_the_right_hash_never_ends_the_process(sealed, tmp_path, kind):
    command = [sys.executable, __file__, str(sealed), str(tmp_path), kind]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        command, env=where, capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]


if __name__ == "__main__":
    load_damaged(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
