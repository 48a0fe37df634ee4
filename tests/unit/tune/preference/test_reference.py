"""Stored numbers are those of these weights and these examples, or the run is refused."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.checkpoint import Checkpointer
from fornax.config.errors import CheckpointError, ConfigError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.models import Decoder, save_pretrained
from fornax.train.task import Hosts
from fornax.tune.stores import (
    ReferenceKey,
    data_fingerprint,
    for_each_example,
    stored,
    weights_fingerprint,
)

KEY = ReferenceKey(weights="w", data="d", compute="c")
NUMBERS = np.arange(6, dtype=np.float32).reshape(3, 2)


def never() -> np.ndarray:
    raise AssertionError("computed again")


def with_step(out: Path) -> None:
    """A run that has trained."""
    with Checkpointer(out / "checkpoints") as checkpointer:
        checkpointer.save(1, state={"x": jnp.zeros(1)}, data={}, config_yaml="{}", metadata={})


def test_numbers_are_computed_once(tmp_path: Path):
    first = stored(tmp_path, "train", KEY, lambda: NUMBERS)
    again = stored(tmp_path, "train", KEY, never)
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    ("part", "named"), [("weights", "weights"), ("data", "examples"), ("compute", "dtypes")]
)
def test_a_change_is_computed_anew_before_the_first_step_and_refused_after(
    tmp_path: Path, part: str, named: str
):
    stored(tmp_path, "train", KEY, lambda: NUMBERS)
    change: Any = {part: "other"}
    changed = dataclasses.replace(KEY, **change)
    np.testing.assert_array_equal(
        stored(tmp_path, "train", changed, lambda: NUMBERS + 1), NUMBERS + 1
    )
    with_step(tmp_path)
    with pytest.raises(ConfigError, match=rf"{named}.*another --out"):
        stored(tmp_path, "train", KEY, lambda: NUMBERS)


def test_damage_is_found(tmp_path: Path):
    stored(tmp_path, "train", KEY, lambda: NUMBERS)
    np.save(tmp_path / "reference" / "train.npy", NUMBERS + 1e-3)
    with pytest.raises(CheckpointError, match="damaged"):
        stored(tmp_path, "train", KEY, never)


def test_a_pass_that_was_killed_leaves_nothing_to_trust(tmp_path: Path):
    stored(tmp_path, "train", KEY, lambda: NUMBERS)
    (tmp_path / "reference" / "train.json").unlink()  # the record is written last
    np.testing.assert_array_equal(stored(tmp_path, "train", KEY, lambda: NUMBERS + 2), NUMBERS + 2)


def test_fingerprints_tell_tokens_and_their_boundaries_apart():
    a, b = np.array([1, 2], np.int32), np.array([3], np.int32)
    joined = np.array([1, 2, 3], np.int32)
    prints = [data_fingerprint(x) for x in ([a, b], [b, a], [joined], [a, b.astype(np.int64)])]
    assert len(set(prints)) == 4
    assert prints[0] == data_fingerprint([a.copy(), b.copy()])


def test_one_changed_weight_changes_the_fingerprint(tmp_path: Path, decoder: Decoder):
    save_pretrained(decoder, tmp_path)
    before = weights_fingerprint(tmp_path)
    assert weights_fingerprint(tmp_path) == before
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert weights_fingerprint(tmp_path) != before


def test_a_run_is_known_by_its_last_checkpoint(tmp_path: Path):
    with_step(tmp_path)
    before = weights_fingerprint(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    assert weights_fingerprint(tmp_path) == before


def test_every_example_is_visited_once_and_fillers_are_dropped(decoder: Decoder):
    examples = np.array([[4, 0], [2, 1], [3, -1]], np.int32)

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for row in examples:
            yield {"example": row, "value": (row * 10).astype(np.float32)}

    mesh = make_mesh(MeshConfig(), jax.devices()[:2])

    def visit(count: int) -> Any:
        return for_each_example(
            decoder,
            lambda model, batch: batch["value"] + model.config.num_layers,
            batches(),
            count,
            hosts=Hosts(),
            mesh=mesh,
            rules=DEFAULT_RULES,
        )

    np.testing.assert_array_equal(visit(5), np.arange(5) * 10 + 2)
    with pytest.raises(ValueError, match="1 of 6 examples"):
        visit(6)
