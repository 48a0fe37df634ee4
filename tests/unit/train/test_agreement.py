"""What processes say of themselves, and who is named where they differ."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.xla_flags import xla_flags

from fornax.cluster.coordination import CoordinationService
from fornax.train.agreement import code_digest, differences, state_digests
from fornax.train.guard import SkipConfig, start_guard
from fornax.train.state import TrainState


@pytest.fixture
def state() -> TrainState:
    """A weight whole on all devices, one in eight parts, and a scalar."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    params = {
        "whole": jax.device_put(jnp.arange(6.0), NamedSharding(mesh, PartitionSpec())),
        "parts": jax.device_put(
            jnp.arange(32, dtype=jnp.bfloat16).reshape(16, 2),
            NamedSharding(mesh, PartitionSpec("fsdp")),
        ),
    }
    return TrainState(
        step=jnp.int32(3),
        updates=jnp.int32(3),
        params=params,
        other={},
        optimizer={},
        guard=start_guard(SkipConfig()),
        rng=jnp.zeros(2, jnp.uint32),
    )


def test_one_changed_element_changes_the_digest_of_its_part_alone(state: TrainState):
    before = state_digests(state)
    assert sum("of (16, 2)" in part for part in before) == 8
    parts = state.params["parts"]
    changed = jax.device_put(parts.at[5, 1].add(1), parts.sharding)
    after = state_digests(replace(state, params={**state.params, "parts": changed}))
    assert before.keys() == after.keys()
    [part] = [part for part in before if before[part] != after[part]]
    assert part.startswith("[4:6, :] of (16, 2)")


def test_two_arrays_that_change_places_are_another_state(state: TrainState):
    one = {"a": jnp.zeros(4), "b": jnp.ones(4)}
    other = {"a": jnp.ones(4), "b": jnp.zeros(4)}
    digests = [state_digests(replace(state, params=params)) for params in (one, other)]
    assert digests[0] != digests[1]


def test_those_that_differ_are_named_with_what_they_differ_in():
    said = [
        {"the step": {"": "10"}, "the data position": {"0": "a", "1": "b"}},
        {"the step": {"": "10"}, "the data position": {"1": "c"}},
        {"the step": {"": "8"}, "the data position": {"2": "d"}},
    ]
    assert differences(said) == [
        "process 2 differs from process 0 in the step (8 and 10)",
        "process 1 differs from process 0 in the data position of part 1 (c and b)",
    ]
    assert differences([said[0], said[0]]) == []


def test_the_code_has_one_digest():
    assert code_digest() == code_digest()
    assert len(code_digest()) == 16


RANK = """
import os, sys
import jax, jax.numpy as jnp
from fornax.config import ClusterError
from fornax.train.agreement import agree
from fornax.train.guard import SkipConfig, start_guard
from fornax.train.state import TrainState

rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, rank, coordinator_bind_address="127.0.0.1:0")
state = TrainState(
    step=jnp.int32(3), updates=jnp.int32(3), params={"w": jnp.zeros((4, 2))}, other={},
    optimizer={}, guard=start_guard(SkipConfig()), rng=jnp.zeros(2, jnp.uint32),
)
agree(3, state, {rank: {"batch": 3 + rank}})
print("agreed", flush=True)
other = {**vars(state), "params": {"w": jnp.zeros((4, 2)).at[1, 1].add(1e-7 * rank)}}
try:
    agree(3 + rank, TrainState(**other), {0: {"batch": 3}})
except ClusterError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_a_process_with_another_state_is_named_by_both(tmp_path: Path):
    """One element of one parameter, 1e-7 off, and another step."""
    with (tmp_path / "log").open("ab") as log, CoordinationService(2, log) as service:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, service.address, str(rank)],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=400)[0] for process in ranks]
    for output in outputs:
        lines = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
        assert lines[0] == "agreed", output
        assert "process 1 differs from process 0 in the step (4 and 3)" in lines[1]
        assert "process 1 differs from process 0 in the state of part" in lines[1]
        assert "the data position" not in lines[1]
