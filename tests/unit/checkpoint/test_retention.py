"""Which checkpoints stay."""

import datetime

import jax.numpy as jnp
import pytest

from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.checkpoint.retention import Kept, expired
from fornax.config.errors import ConfigError

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def kept(step, minutes=0.0, **metrics):
    return Kept(step, START + datetime.timedelta(minutes=minutes), metrics)


def stays(config, checkpoints):
    gone = expired(config, checkpoints)
    return [it.step for it in checkpoints if it.step not in gone]


def test_the_newest_stay():
    assert stays(CheckpointConfig(keep_last=2), [kept(s) for s in range(1, 6)]) == [4, 5]


def test_multiples_stay_for_good():
    config = CheckpointConfig(keep_last=1, keep_every_steps=4)
    assert stays(config, [kept(s) for s in range(1, 12)]) == [4, 8, 11]


def test_one_an_interval_stays():
    config = CheckpointConfig(keep_last=1, keep_every_minutes=10)
    assert stays(config, [kept(s, minutes=4 * s) for s in range(8)]) == [0, 3, 6, 7]


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 4]), ("max", [1, 3])])
def test_the_best_stay(mode, best):
    config = CheckpointConfig(keep_last=1, keep_best=2, best_metric="loss", best_mode=mode)
    losses = {1: 9.0, 2: 1.0, 3: 8.0, 4: 2.0, 5: 5.0}
    checkpoints = [kept(step, loss=loss) for step, loss in losses.items()]
    assert stays(config, checkpoints) == [*best, 5]


def test_of_equally_good_ones_the_newer_stays():
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="loss")
    checkpoints = [kept(1, loss=1.0), kept(2, loss=1.0), kept(3, loss=2.0)]
    assert stays(config, checkpoints) == [2, 3]


def test_a_checkpoint_without_the_metric_earns_no_place():
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="loss")
    assert stays(config, [kept(1), kept(2, loss=3.0), kept(3), kept(4)]) == [2, 4]


def test_a_run_keeps_what_its_rules_say(tmp_path):
    config = CheckpointConfig(keep_last=2, keep_every_steps=4, keep_best=1, best_metric="loss")
    with Checkpointer(tmp_path, config) as it:
        for step in range(1, 9):
            loss = 0.0 if step == 3 else 1.0 + step
            it.save(step, state={"w": jnp.zeros(3)}, metrics={"loss": loss})
    assert it.all_steps() == [3, 4, 7, 8]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"keep_last": 0}, "keep_last=0 would leave nothing"),
        ({"keep_every_steps": 0}, "keep_every_steps=0"),
        ({"keep_every_minutes": -1.0}, "keep_every_minutes=-1.0"),
        ({"keep_best": 2}, "work only together"),
        ({"best_metric": "loss"}, "work only together"),
        ({"keep_best": -1}, "keep_best=-1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_wrong_values_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        CheckpointConfig(**fields)
