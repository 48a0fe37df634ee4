"""Rollouts one step off: which weights make what, staleness, resuming, faults, stopping."""

import functools
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.config.errors import ConfigError, EngineError
from fornax.tune.rollout import (
    AsyncRollouts,
    SamplerStats,
    SampleSettings,
    rollouts_from_arrays,
    rollouts_to_arrays,
    sample_seed,
)


class Fake:
    """Knows its version; notes the thread that uses it."""

    def __init__(self):
        self.version = -1
        self.weights = None
        self.log = []
        self.interrupted = threading.Event()

    def update(self, params, version):
        self.weights, self.version = params, version
        self.log.append(("update", version, params))

    def stats(self):
        return SamplerStats()

    def interrupt(self):
        self.interrupted.set()


def make(sampler, index):
    sampler.log.append(("make", index, sampler.version))
    return {"index": np.array(index), "version": np.array(sampler.version)}


def rollouts_of(sampler, **options):
    options = {"make": make, "save": dict, "load": dict, **options}
    made = options.pop("make")
    return AsyncRollouts(sampler, made, **options)


def train(rollouts, steps, *, updates=1, first=0):
    """The loop of a trainer whose weights at version v are v * 10; returns what batches it took."""
    taken = []
    for version in range(first, steps):
        rollouts.follow(version, lambda version=version: version * 10)
        if version % updates == 0:
            batch = rollouts.take(version // updates)
            taken.append((int(batch["index"]), int(batch["version"])))
    return taken


def test_each_batch_is_made_with_the_weights_before_the_last_update():
    sampler = Fake()
    rollouts = rollouts_of(sampler)
    assert train(rollouts, 5) == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]
    rollouts.close()
    updates = [entry for entry in sampler.log if entry[0] == "update"]
    assert updates == [("update", v, v * 10) for v in range(5)]


def test_without_staleness_each_batch_is_made_when_it_is_taken():
    sampler = Fake()
    assert train(rollouts_of(sampler, max_staleness=0), 4) == [(i, i) for i in range(4)]
    assert threading.active_count() == 1 or not any(
        thread.name == "fornax-rollouts" for thread in threading.enumerate()
    )


@pytest.mark.parametrize(
    ("staleness", "versions"), [(1, [0, 3, 7]), (3, [0, 1, 5]), (4, [0, 0, 4])]
)
def test_waiting_begins_no_sooner_than_the_bound_allows(staleness, versions):
    rollouts = rollouts_of(Fake(), updates_per_batch=4, max_staleness=staleness)
    assert train(rollouts, 12, updates=4) == list(enumerate(versions))
    rollouts.close()


def test_discarding_makes_anew_what_turned_out_too_old():
    rollouts = rollouts_of(Fake(), updates_per_batch=4, max_staleness=2, when_stale="discard")
    assert train(rollouts, 12, updates=4) == [(0, 0), (1, 4), (2, 8)]
    assert rollouts.discarded == 2
    rollouts.close()


def test_rollouts_are_made_while_the_trainer_works():
    ready = threading.Event()

    def waits(sampler, index):
        if index == 1:
            assert ready.wait(120)
        return make(sampler, index)

    rollouts = rollouts_of(Fake(), make=waits)
    rollouts.follow(0, lambda: 0)
    rollouts.take(0)
    ready.set()  # what a trainer does meanwhile
    rollouts.follow(1, lambda: 10)
    assert int(rollouts.take(1)["version"]) == 0
    rollouts.close()


@pytest.mark.parametrize(
    "options", [{}, {"updates_per_batch": 3, "max_staleness": 2}, {"max_staleness": 0}]
)
def test_a_resumed_run_takes_the_batches_of_one_that_was_not_killed(options):
    updates = options.get("updates_per_batch", 1)
    whole = train(rollouts_of(Fake(), **options), 12, updates=updates)
    for killed in range(1, 12):
        first = rollouts_of(Fake(), **options)
        before = train(first, killed, updates=updates)
        state = {name: array.copy() for name, array in first.state().items()}
        first.close()
        second = rollouts_of(Fake(), **options)
        second.restore(state)
        assert before + train(second, 12, updates=updates, first=killed) == whole
        second.close()


def test_faults_come_to_the_thread_that_takes():
    def breaks(sampler, index):
        if index:
            raise ValueError("broken")
        return make(sampler, index)

    rollouts = rollouts_of(Fake(), make=breaks)
    assert train(rollouts, 1) == [(0, 0)]
    with pytest.raises(ValueError, match="broken"):
        rollouts.state()
    rollouts.follow(1, lambda: 10)
    with pytest.raises(ValueError, match="broken"):
        rollouts.take(1)
    with pytest.raises(ConfigError, match="call follow first"):
        rollouts_of(Fake()).take(0)
    with pytest.raises(ConfigError, match="max_staleness=-1"):
        rollouts_of(Fake(), max_staleness=-1)


# With the engine.


def collect(sampler, index):
    settings = SampleSettings(n=2, max_tokens=10, temperature=1.3)
    seeds = [sample_seed(0, index, prompt) for prompt in range(3)]
    return sampler.sample([[5, 6], [7], [8, 9, 10]], settings, seeds)


def batches_of(sampler, model, count, save_at=None):
    """What a run of the engine makes; with `save_at` it is saved and continued in between."""
    options = {"save": rollouts_to_arrays, "load": rollouts_from_arrays}
    rollouts = AsyncRollouts(sampler, collect, **options)
    found = []
    for version in range(count):
        if version == save_at:
            state = rollouts.state()
            rollouts.close()
            rollouts = AsyncRollouts(sampler, collect, **options)
            rollouts.restore(state)
        scale = 1 + 0.1 * version
        scaled = jax.tree.map(lambda x, scale=scale: x * scale, nnx.state(model))
        rollouts.follow(version, lambda scaled=scaled: scaled)
        found.append(rollouts.take(version))
    rollouts.close()
    return found


def flat(batches):
    return [
        (one.tokens.tolist(), one.logprobs.tolist(), one.versions.tolist(), one.text, one.seed)
        for batch in batches
        for group in batch
        for one in group
    ]


@pytest.mark.slow
def test_engine_rollouts_repeat_with_and_without_a_kill(sampler, model):
    whole = batches_of(sampler, model, 4)
    for version, batch in enumerate(whole):
        expected = max(version - 1, 0)
        assert {int(v) for group in batch for one in group for v in one.versions} == {expected}
    assert flat(batches_of(sampler, model, 4, save_at=2)) == flat(whole)


def test_arrays_of_rollouts_are_the_rollouts(sampler):
    groups = [*collect(sampler, 0), []]
    arrays = rollouts_to_arrays(groups)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    again = rollouts_from_arrays(arrays)
    assert flat([again]) == flat([groups])
    assert [len(group) for group in again] == [2, 2, 2, 0]
    assert again[0][0].finish_reason == groups[0][0].finish_reason
    assert rollouts_from_arrays(rollouts_to_arrays([])) == []


def test_closing_stops_what_is_being_made(sampler, model):
    begun = threading.Event()

    def endless(sampler, index):
        for round_number in itertools.count():
            sampler.sample([[5]], SampleSettings(max_tokens=4), [round_number])
            if not index:
                break
            begun.set()
        return []

    rollouts = AsyncRollouts(sampler, endless, save=rollouts_to_arrays, load=rollouts_from_arrays)
    rollouts.follow(0, lambda: nnx.state(model))
    rollouts.take(0)
    assert begun.wait(120)
    began = time.monotonic()
    rollouts.close()
    assert time.monotonic() - began < 100
    assert not sampler.busy
    with pytest.raises(EngineError, match="interrupted"):
        sampler.sample([[5]], SampleSettings(max_tokens=4), [0])
    sampler.update(model, 0)
    assert len(sampler.sample([[5]], SampleSettings(max_tokens=4), [0])) == 1


@pytest.mark.exhaustive
def test_a_trainer_over_eight_devices_gives_its_weights_up_while_rollouts_are_made(sampler, model):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("x"))
    graphdef, state = nnx.split(model)
    state = jax.device_put(jax.tree.map(jnp.copy, state), whole)
    tokens = jax.device_put(np.arange(8 * 16, dtype=np.int32).reshape(8, 16), rows)

    def loss(state, tokens):
        logits = nnx.merge(graphdef, state)(tokens)
        return jax.nn.log_softmax(logits)[..., 0].mean()

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def step(state, tokens):
        return jax.tree.map(lambda p, g: p - 1e-4 * g, state, jax.grad(loss)(state, tokens))

    rollouts = AsyncRollouts(sampler, collect, save=rollouts_to_arrays, load=rollouts_from_arrays)
    for version in range(40):
        rollouts.follow(version, lambda state=state: state)
        batch = rollouts.take(version)
        made = {int(v) for group in batch for one in group for v in one.versions}
        assert made == {max(version - 1, 0)}
        for _ in range(2):
            state = jax.block_until_ready(step(state, tokens))
    rollouts.close()


class Versions(Fake):
    """Holds every version that it was given."""

    def at(self, version):
        held = Versions()
        held.version, held.log = version, self.log
        return held


@pytest.mark.parametrize("updates", [1, 3])
def test_two_batches_ahead_are_each_made_with_the_weights_of_their_beginning(updates):
    rollouts = rollouts_of(
        Versions(), updates_per_batch=updates, max_staleness=2 * updates, ahead=2
    )
    expected = [(n, max(0, n - 2) * updates) for n in range(6)]
    assert train(rollouts, 6 * updates, updates=updates) == expected
    state = rollouts.state()
    rollouts.close()
    again = rollouts_of(Versions(), updates_per_batch=updates, max_staleness=2 * updates, ahead=2)
    again.restore(state)
    more = train(again, 9 * updates, updates=updates, first=6 * updates)
    again.close()
    assert more == [(n, (n - 2) * updates) for n in range(6, 9)]


def test_more_than_one_batch_ahead_needs_a_sampler_of_several_versions():
    with pytest.raises(ConfigError, match="holds several versions"):
        rollouts_of(Fake(), max_staleness=2, ahead=2)
