"""Damage to any file of a step is found before loading, and named with what to do."""

import shutil

import jax
import jax.numpy as jnp
import pytest

from fornax.checkpoint import Checkpointer
from fornax.config.errors import CheckpointError

WANTED = {"w": jax.ShapeDtypeStruct((100, 100), jnp.float32)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    with Checkpointer(root) as it:
        for step in (1, 2, 3):
            state = {"w": jnp.full((100, 100), float(step)) + jnp.arange(100.0)}
            it.save(step, state=state, config_yaml="model: tiny\n", data={0: {"at": step}})
    return root


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def files_of(step_directory):
    return sorted(path for path in step_directory.rglob("*") if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


def test_intact_copies_restore(copy):
    with Checkpointer(copy) as it:
        assert float(it.restore(WANTED).state["w"][0, 0]) == 3.0


@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_any_damaged_file_is_named(copy, damage):
    names = [path.relative_to(copy / "3") for path in files_of(copy / "3")]
    assert len(names) >= 8
    for name in names:
        path = copy / "3" / name
        if path.stat().st_size == 0 and damage is not remove:
            continue
        before = path.read_bytes()
        damage(path)
        with Checkpointer(copy) as it:
            if damage is remove and name.name == "fornax.0.json":
                assert it.latest_step() == 2
            else:
                with pytest.raises(CheckpointError) as caught:
                    it.restore(WANTED)
                assert f"step 3: {path}" in str(caught.value)
                assert "Step 2 is intact" in str(caught.value)
                assert str(copy / "3") in str(caught.value)
        path.write_bytes(before)


def test_advice_skips_steps_that_are_damaged_too(copy):
    for step in ("2", "3"):
        flip(max(files_of(copy / step), key=lambda path: path.stat().st_size))
    with Checkpointer(copy) as it:
        with pytest.raises(CheckpointError, match="Step 1 is intact"):
            it.restore(WANTED)
        assert it.restore(WANTED, 1).data == {0: {"at": 1}}
        flip(max(files_of(copy / "1"), key=lambda path: path.stat().st_size))
        with pytest.raises(CheckpointError, match="No older step is intact"):
            it.restore(WANTED)


def test_a_damaged_step_is_not_cleaned_up_by_the_next_save(copy):
    flip(copy / "3" / "fornax.0.json")
    with Checkpointer(copy) as it:
        it.save(4, state={"w": jnp.zeros((100, 100))}, force=True)
        assert (copy / "3").is_dir()
        assert it.latest_step() == 4


def test_a_damaged_record_has_no_config(copy):
    flip(copy / "3" / "fornax.0.json")
    with Checkpointer(copy) as it:
        with pytest.raises(CheckpointError, match=r"own checksum\. Step 2 is intact"):
            it.read_config()
        assert it.read_config(2) == "model: tiny\n"


def test_a_record_of_another_format_is_refused(copy):
    record = copy / "3" / "fornax.0.json"
    record.write_text('{"crc32": 558161692, "body": "{}"}')
    with Checkpointer(copy) as it, pytest.raises(CheckpointError, match=r"fornax\.0\.json"):
        it.restore(WANTED)


def test_a_pickle_in_place_of_a_record_is_not_executed(copy, tmp_path):
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    (copy / "3" / "fornax.0.json").write_bytes(pickle.dumps(Evil()))
    with Checkpointer(copy) as it, pytest.raises(CheckpointError, match="cannot be read"):
        it.restore(WANTED)
    assert not (tmp_path / "owned").exists()
