"""Artifacts on disk: what is saved is loaded, and what is damaged is said to be."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from fornax.plan.artifact import ArrayFact, Artifact, DeviceFact, MemoryFacts

_ARTIFACT = Artifact(
    program="train_step",
    topology="v5e:2x2",
    mesh={"fsdp": 2, "tensor": 2},
    devices=(
        DeviceFact(coords=(0, 0, 0), core=0, slice=0),
        DeviceFact(coords=(1,), core=1, slice=2),
    ),
    arguments=(
        ArrayFact(
            name="params/embed/kernel",
            owner="parameters",
            shape=(8, 4),
            dtype="bfloat16",
            axes=(("tensor", "fsdp"), ()),
            bytes_device=16,
        ),
        ArrayFact(
            name="step",
            owner="other",
            shape=(),
            dtype="int32",
            axes=(),
            bytes_device=4,
        ),
        ArrayFact(
            name="updates",
            owner="other",
            shape=(),
            dtype="int32",
            axes=(),
            bytes_device=4,
        ),
    ),
    memory=MemoryFacts(arguments=24, outputs=30, aliased=20, temporaries=100, code=7),
    hlo="HloModule jit_step\n",
    versions={"jax": "0.10.2", "libtpu": ""},
    lower_seconds=0.5,
    compile_seconds=2.0,
    notes=("a note",),
)


def test_an_artifact_reads_back_equal(tmp_path: Path) -> None:
    _ARTIFACT.save(tmp_path / "kept")
    assert Artifact.load(tmp_path / "kept") == _ARTIFACT


def test_a_device_needs_what_does_not_lie_on_top_of_something_else() -> None:
    assert _ARTIFACT.memory.total == 7 + 24 + 30 - 20 + 100


def test_bytes_add_up_by_owner() -> None:
    assert _ARTIFACT.owned() == {"parameters": 16, "other": 8}


def _break_format(folder: Path) -> None:
    told = json.loads((folder / "artifact.json").read_text())
    (folder / "artifact.json").write_text(json.dumps({**told, "format": 0}))


def _break_field(folder: Path) -> None:
    told = json.loads((folder / "artifact.json").read_text())
    (folder / "artifact.json").write_text(json.dumps({**told, "memory": {"arguments": 1}}))


def _cut_json(folder: Path) -> None:
    (folder / "artifact.json").write_text((folder / "artifact.json").read_text()[:50])


def _cut_text(folder: Path) -> None:
    (folder / "hlo.txt.gz").write_bytes((folder / "hlo.txt.gz").read_bytes()[:-6])


def _garble_text(folder: Path) -> None:
    (folder / "hlo.txt.gz").write_bytes(b"no gzip")


def _empty_text(folder: Path) -> None:
    (folder / "hlo.txt.gz").write_bytes(b"")


def _other_encoding(folder: Path) -> None:
    (folder / "hlo.txt.gz").write_bytes(gzip.compress(b"\xff\xfe"))


@pytest.mark.parametrize(
    "damage",
    [_break_format, _break_field, _cut_json, _cut_text, _garble_text, _empty_text, _other_encoding],
    ids=lambda f: f.__name__,
)
def test_damage_is_a_value_error(damage, tmp_path: Path) -> None:
    _ARTIFACT.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"."):  # json's, zlib's and ours
        Artifact.load(tmp_path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    dataclasses.replace(_ARTIFACT).save(tmp_path)
    (tmp_path / "hlo.txt.gz").unlink()
    with pytest.raises(OSError, match=r"hlo\.txt\.gz"):
        Artifact.load(tmp_path)
