"""What is saved comes back whole, on any mesh and dtype, and what is not whole is never listed."""

import shutil
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.checkpoint.files import checksums
from fornax.checkpoint.records import read_record
from fornax.config.errors import CheckpointError


class Moments(NamedTuple):
    count: jax.Array
    mu: dict


def make_state(offset=0.0):
    w = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) + offset
    return {
        "params": {"w": w, "b": jnp.arange(8, dtype=jnp.bfloat16)},
        "opt": (Moments(jnp.int32(7), {"w": 2 * w}), ()),
        "rng": jax.random.key(3),
        "layers": [jnp.ones((2, 3)), jnp.zeros(())],
    }


def abstract(state, sharding=None, dtype=None):
    def one(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(
            x.shape, dtype if dtype and floating else x.dtype, sharding=sharding
        )

    return jax.tree.map(one, state)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)

    def one(a, b):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(one, got, want)


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "checkpoints") as it:
        yield it


def test_everything_comes_back(checkpointer):
    state = make_state()
    data = {0: {"epoch": 1, "buffer": [1, 2]}, 5: {"epoch": np.int64(2)}}
    assert checkpointer.save(
        12, state=state, data=data, config_yaml="a: 1\n", metadata={"tokens": 3}, force=True
    )
    restored = checkpointer.restore(abstract(state))
    assert restored.step == 12
    assert_equal(restored.state, state)
    assert restored.data == {0: {"epoch": 1, "buffer": [1, 2]}, 5: {"epoch": 2}}
    assert restored.config_yaml == checkpointer.read_config() == "a: 1\n"
    assert restored.metadata == {"tokens": 3}


def test_donated_and_mutated_inputs_are_saved_as_they_were(checkpointer):
    state = {"w": jnp.zeros((512, 512))}
    data = {0: {"position": [0]}}
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for step in range(4):
        checkpointer.save(step, state=state, data=data)
        state = advance(advance(state))
        data[0]["position"][0] += 1
    checkpointer.wait()
    for step in (1, 2, 3):
        restored = checkpointer.restore(abstract(state), step)
        np.testing.assert_array_equal(restored.state["w"], 2 * step)
        assert restored.data[0]["position"] == [step]


def test_another_mesh_and_dtype(checkpointer):
    def on(shape, *spec):
        mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        return NamedSharding(mesh, PartitionSpec(*spec))

    w = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 7
    checkpointer.save(0, state={"w": jax.device_put(w, on((4, 2), "a", "b"))}, force=True)
    for sharding in (on((2, 2), None, ("a", "b")), on((8, 1), "a"), on((1, 1))):
        for dtype in (jnp.float32, jnp.bfloat16):
            wanted = {"w": jax.ShapeDtypeStruct((8, 8), dtype, sharding=sharding)}
            got = checkpointer.restore(wanted).state["w"]
            assert got.sharding == sharding
            np.testing.assert_array_equal(got, w.astype(dtype))


def test_bfloat16_restores_as_float32(checkpointer):
    checkpointer.save(0, state={"w": jnp.arange(4, dtype=jnp.bfloat16)}, force=True)
    got = checkpointer.restore({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}).state["w"]
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.arange(4))


def test_keys_of_another_implementation_come_back(checkpointer):
    state = {"rng": jax.random.key(5, impl="rbg"), "legacy": jax.random.PRNGKey(1)}
    checkpointer.save(0, state=state, force=True)
    assert_equal(checkpointer.restore(abstract(state)).state, state)


def test_part_of_a_state_restores_alone(checkpointer):
    state = make_state()
    checkpointer.save(0, state=state, force=True)
    wanted = {"params": abstract(state["params"])}
    assert_equal(checkpointer.restore(wanted, partial=True).state, {"params": state["params"]})


def test_a_step_saved_twice_is_left_alone(checkpointer):
    assert checkpointer.save(1, state={"w": jnp.zeros(3)}, force=True)
    assert not checkpointer.save(1, state={"w": jnp.ones(3)}, force=True)
    wanted = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    np.testing.assert_array_equal(checkpointer.restore(wanted).state["w"], 0)


def test_what_is_complete_is_read_from_disk(checkpointer):
    for step in (1, 2):
        checkpointer.save(step, state={"w": jnp.zeros(3)})
    assert checkpointer.latest_step() in (1, None)
    checkpointer.wait()
    assert checkpointer.all_steps() == [1, 2]
    shutil.rmtree(checkpointer.directory / "2")
    assert checkpointer.latest_step() == 1
    (checkpointer.directory / "1" / "fornax.0.json").unlink()
    assert checkpointer.latest_step() is None


def test_a_step_without_all_records_is_not_complete(checkpointer):
    checkpointer.save(1, state={"w": jnp.zeros(3)}, force=True)
    record = checkpointer.directory / "1" / "fornax.0.json"
    other = checkpointer.directory / "3"
    shutil.copytree(record.parent, other)
    (other / record.name).unlink()
    assert checkpointer.all_steps() == [1]


def test_only_a_writer_clears_leftovers(checkpointer):
    checkpointer.save(1, state={"w": jnp.zeros(3)}, force=True)
    root = checkpointer.directory
    for name in ("2", "3.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-17"):
        (root / name).mkdir()
    (root / "notes").mkdir()
    with Checkpointer(root) as reader:
        reader.restore({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert (root / "2").is_dir()
    with Checkpointer(root) as writer:
        writer.save(2, state={"w": jnp.ones(3)})
    names = sorted(path.name for path in root.iterdir())
    assert names == ["1", "2", "fornax-checkpoints", "notes"]
    assert writer.all_steps() == [1, 2]


def test_checkpoints_of_others_are_never_touched(tmp_path):
    (tmp_path / "100").mkdir()
    (tmp_path / "100" / "theirs").write_text("precious")
    with Checkpointer(tmp_path) as it:
        with pytest.raises(CheckpointError, match="holds 100, which Fornax did not write"):
            it.save(0, state={"w": jnp.zeros(3)})
        assert it.all_steps() == []
    assert (tmp_path / "100" / "theirs").read_text() == "precious"


def test_state_of_another_shape_is_explained(checkpointer):
    state = make_state()
    checkpointer.save(3, state=state, force=True)
    wanted = abstract(state)
    wanted["params"]["extra"] = jax.ShapeDtypeStruct((1,), jnp.float32)
    wanted["params"]["w"] = jax.ShapeDtypeStruct((8, 9), jnp.float32)
    wanted["params"]["b"] = jax.ShapeDtypeStruct((8,), jnp.int32)
    del wanted["layers"]
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(wanted)
    text = str(caught.value)
    assert "not in the checkpoint: params/extra" in text
    assert "only in the checkpoint: layers/0, layers/1" in text
    assert "params/w (saved (8, 8) float32, asked (8, 9) float32)" in text
    assert "params/b (saved (8,) bfloat16, asked (8,) int32)" in text


def test_missing_steps_are_explained(tmp_path):
    wanted = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with Checkpointer(tmp_path / "nowhere") as it, pytest.raises(CheckpointError) as caught:
        it.restore(wanted)
    assert "nowhere does not exist" in str(caught.value)
    with Checkpointer(tmp_path) as it:
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            it.read_config()
        it.save(4, state={"w": jnp.zeros(3)}, force=True)
        with pytest.raises(CheckpointError, match="complete are 4"):
            it.restore(wanted, 5)


def test_a_url_or_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is a URL"):
        Checkpointer("gs://bucket/run")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpointer(tmp_path / "file")


def test_a_directory_that_cannot_be_made_is_refused():
    with Checkpointer("/proc/fornax") as it, pytest.raises(CheckpointError) as caught:
        it.save(0, state={"w": jnp.zeros(3)})
    assert "cannot write checkpoints to /proc/fornax" in str(caught.value)


def test_data_that_is_no_json_is_refused_at_once(checkpointer):
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        checkpointer.save(0, state={"w": jnp.zeros(3)}, data={0: {"it": object()}})
    checkpointer.check()
    assert checkpointer.all_steps() == []


def test_a_failure_in_the_background_surfaces_once_and_leaves_the_rest(checkpointer, monkeypatch):
    checkpointer.save(1, state={"w": jnp.zeros(3)}, force=True)

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fornax.checkpoint.checkpointer.checksums", broken)
    checkpointer.save(2, state={"w": jnp.ones(3)})
    while checkpointer.saving:
        time.sleep(0.01)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.check()
    assert "saving step 2" in str(caught.value)
    assert "no space left on the disk" in str(caught.value)
    assert "Step 1 is intact" in str(caught.value)
    monkeypatch.undo()
    checkpointer.check()
    assert sorted(path.name for path in checkpointer.directory.iterdir()) == [
        "1",
        "fornax-checkpoints",
    ]
    checkpointer.save(2, state={"w": jnp.ones(3)}, force=True)
    assert checkpointer.all_steps() == [1, 2]


def test_closing_reports_the_last_failure(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fornax.checkpoint.checkpointer.checksums", broken)
    it = Checkpointer(tmp_path)
    it.save(1, state={"w": jnp.zeros(3)})
    with pytest.raises(CheckpointError, match="Input/output error"):
        it.close()


def test_verify_size_misses_what_checksum_finds(tmp_path):
    wanted = {"w": jax.ShapeDtypeStruct((64,), jnp.float32)}
    with Checkpointer(tmp_path, CheckpointConfig(verify="size")) as it:
        it.save(1, state={"w": jnp.zeros(64)}, force=True)
        files = [p for p in (tmp_path / "1").rglob("*") if p.name == "commit_success.txt"]
        files[0].write_bytes(files[0].read_bytes()[::-1])
        it.restore(wanted)
    with Checkpointer(tmp_path) as it, pytest.raises(CheckpointError, match="CRC-32 differs"):
        it.restore(wanted)


def test_a_step_that_cannot_be_deleted_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(13, "Permission denied", str(path))

    it = Checkpointer(tmp_path, CheckpointConfig(keep_last=1))
    it.save(1, state={"w": jnp.zeros(3)}, force=True)
    monkeypatch.setattr("fornax.checkpoint.files.shutil.rmtree", refuse)
    with pytest.raises(CheckpointError, match=r"step 2 is saved, but step 1 .* cannot be deleted"):
        it.save(2, state={"w": jnp.zeros(3)}, force=True)
    monkeypatch.undo()
    it.close()
    assert it.all_steps() == [2]


def test_leftovers_that_cannot_be_cleared_are_named(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as it:
        it.save(1, state={"w": jnp.zeros(3)}, force=True)
    (tmp_path / "2").mkdir()

    def refuse(path):
        raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr("fornax.checkpoint.files.shutil.rmtree", refuse)
    with Checkpointer(tmp_path) as it, pytest.raises(CheckpointError, match=r"cannot clear .*2 "):
        it.save(3, state={"w": jnp.zeros(3)})


def test_orbax_alone_loads_the_arrays(checkpointer):
    from orbax.checkpoint import v1 as ocp

    checkpointer.save(7, state={"w": jnp.arange(4.0)}, force=True)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"state": {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}}
    got = ocp.load_checkpointables(str(checkpointer.directory / "7"), wanted)
    np.testing.assert_array_equal(got["state"]["w"], np.arange(4.0))


def test_a_process_of_an_earlier_group_saves_nothing(tmp_path, monkeypatch):
    """It lost its network and runs on: refused before it writes, and before a step is complete."""
    root = tmp_path / "checkpoints"
    stale, now = Checkpointer(root), Checkpointer(root)
    stale.begin_epoch(1)
    stale.save(1, state=make_state(), force=True)
    assert read_record(root / "1", 0).epoch == 1

    def taken_over(*arguments):
        now.begin_epoch(2)
        return checksums(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fornax.checkpoint.checkpointer.checksums", taken_over)
        with pytest.raises(CheckpointError, match=r"belongs to group 1 .* is group 2's"):
            stale.save(2, state=make_state(1.0), force=True)
    with pytest.raises(CheckpointError, match=r"step 3 is not saved: .* group 1 .* group 2's"):
        stale.save(3, state=make_state(2.0))
    assert now.all_steps() == [1]
    now.save(2, state=make_state(3.0), force=True)
    assert read_record(root / "2", 0).epoch == 2
    with pytest.raises(CheckpointError, match="belongs to group 1"):
        stale.save(2, state=make_state(4.0))
    state = make_state(3.0)
    assert_equal(now.restore(abstract(state)).state, state)
    alone = Checkpointer(root)  # a run that is not launched has no number, and may continue
    alone.begin_epoch(0)
    assert alone.save(4, state=make_state(), force=True)
