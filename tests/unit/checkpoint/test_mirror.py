"""The copy of checkpoints in an object store, here fsspec's own in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.config.errors import CheckpointError, ConfigError

STATE = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}


@pytest.fixture
def store() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    store.rm("/run", recursive=True) if store.exists("/run") else None
    yield store
    store.rm("/run", recursive=True) if store.exists("/run") else None


def config(**fields: Any) -> CheckpointConfig:
    return CheckpointConfig(mirror="memory://run", **fields)


def save(directory: Path, steps: list[int], **fields: Any) -> None:
    with Checkpointer(directory, config(**fields)) as checkpointer:
        for step in steps:
            state = {"w": jnp.full((4, 8), step, jnp.float32), "n": jnp.int32(step)}
            checkpointer.save(step, state=state, data={0: {"at": step}}, config_yaml=f"s: {step}\n")


def steps_in(store: Any) -> list[int]:
    names = [name.split("/") for name in store.find("/run")]
    folders = [folder for *_, folder, name in names if name == "fornax.0.json"]
    return sorted(int(folder.split("-")[0]) for folder in folders)


def folder_of(store: Any, step: int) -> str:
    (folder,) = {name.split("/")[2] for name in store.find("/run") if f"/{step}-" in name}
    return f"/run/{folder}"


def test_another_directory_goes_on_from_the_store(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2, 3])
    with Checkpointer(tmp_path / "there", config()) as elsewhere:
        assert elsewhere.latest_step() is None
        assert elsewhere.resume_step() == 3
        restored = elsewhere.restore(STATE)
    np.testing.assert_array_equal(restored.state["w"], np.full((4, 8), 3, np.float32))
    assert (restored.data, restored.config_yaml) == ({0: {"at": 3}}, "s: 3\n")
    save(tmp_path / "there", [4])
    assert steps_in(store) == [2, 3, 4]


def test_steps_that_a_run_went_back_from_are_gone_in_both_places(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2, 3], keep_last=3)
    with Checkpointer(tmp_path / "here", config()) as checkpointer:
        checkpointer.discard(after=1)
        assert checkpointer.all_steps() == steps_in(store) == [1]
        assert checkpointer.resume_step() == 1


def test_the_newer_of_both_is_gone_on_from(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2])
    with Checkpointer(tmp_path / "here") as alone:
        state = {"w": jnp.zeros((4, 8)), "n": jnp.int32(5)}
        alone.save(5, state=state)
    assert Checkpointer(tmp_path / "here", config()).resume_step() == 5
    assert steps_in(store) == [1, 2]


def test_the_same_rules_keep_steps_there(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2, 3, 4], keep_last=1, keep_every_steps=3)
    assert steps_in(store) == [3, 4]
    # On another machine only the latest is fetched; the rules hold for what is in the store alone.
    with Checkpointer(tmp_path / "there", config()) as elsewhere:
        elsewhere.resume_step()
    save(tmp_path / "there", [5], keep_last=1, keep_every_steps=3)
    assert steps_in(store) == [3, 5]
    assert {name.split("/")[2].split("-")[0] for name in store.find("/run")} == {"3", "5"}


def test_a_copy_that_was_interrupted_is_not_taken(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2])
    left = folder_of(store, 2)
    store.rm_file(f"{left}/fornax.0.json")
    with Checkpointer(tmp_path / "there", config()) as elsewhere:
        assert elsewhere.resume_step() == 1
    save(tmp_path / "there", [2])
    assert steps_in(store) == [1, 2]
    assert folder_of(store, 2) != left


def test_what_arrives_late_from_a_machine_that_died_harms_no_copy(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2])
    dead = folder_of(store, 2)
    late = {name: store.cat_file(name) for name in store.find(dead)}
    store.rm(dead, recursive=True)
    with Checkpointer(tmp_path / "there", config()) as elsewhere:
        assert elsewhere.resume_step() == 1
    save(tmp_path / "there", [2])
    manifest = max(name for name in late if name.endswith("manifest.ocdbt"))
    store.pipe_file(manifest, b"another length")
    store.pipe_file(f"{dead}/fornax.0.json", late[f"{dead}/fornax.0.json"])
    with Checkpointer(tmp_path / "third", config()) as third:
        assert third.resume_step() == 2
        np.testing.assert_array_equal(third.restore(STATE).state["w"], np.full((4, 8), 2))
    save(tmp_path / "third", [3])
    save(tmp_path / "third", [4])
    assert {name.split("/")[2].split("-")[0] for name in store.find("/run")} == {"2", "3", "4"}


def test_a_copy_that_lacks_a_file_is_not_taken(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1, 2])
    lost = next(name for name in store.find(folder_of(store, 2)) if name.endswith("manifest.ocdbt"))
    store.rm_file(lost)
    with Checkpointer(tmp_path / "there", config()) as elsewhere:
        assert elsewhere.resume_step() == 1


def test_a_damaged_copy_is_named(store: Any, tmp_path: Path):
    save(tmp_path / "here", [1])
    files = [name for name in store.find(folder_of(store, 1)) if not name.endswith("fornax.0.json")]
    largest = max(files, key=store.size)
    store.pipe_file(largest, b"x" * store.size(largest))
    with (
        Checkpointer(tmp_path / "there", config()) as elsewhere,
        pytest.raises(CheckpointError, match="has other contents than were saved"),
    ):
        elsewhere.restore(STATE)


def test_what_cannot_be_reached_is_one_paragraph(tmp_path: Path):
    with pytest.raises(ConfigError, match="mirror=bucket/run is not an address"):
        CheckpointConfig(mirror="bucket/run")
    with pytest.raises(CheckpointError, match=r"at nope://bucket/run cannot be reached: Protocol"):
        Checkpointer(tmp_path, CheckpointConfig(mirror="nope://bucket/run"))
