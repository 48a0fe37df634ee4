"""Checks of a checkpoint: saved on one mesh, restored on another, it is the same run.

Saving and restoring are the trainer's: `Checkpointer.save` of what the loop saves, and
`train.session.start`.
"""

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from fornax.checkpoint import Checkpointer
from fornax.config import ShardingError, dump_yaml
from fornax.optim.tree import flatten
from fornax.preflight.harness import Case, CheckFailed, CheckSkipped, Harness
from fornax.preflight.programs import Program
from fornax.preflight.shrink import DEVICES, describe_mesh, float32, with_mesh
from fornax.preflight.tolerance import Comparison
from fornax.train import Hosts, TrainerConfig
from fornax.train.session import Start, start
from fornax.train.state import TrainState, as_tree

__all__ = ["checkpoint"]

_OTHERS = ({"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "data": 4}, {"data": 8}, {"fsdp": 2})


def checkpoint(harness: Harness) -> Iterator[Case]:
    """The round trip in float32 with a step after it; bits alone in the config's own dtypes."""
    config = float32(harness.config)
    yield Case(
        group="checkpoint",
        name=f"from {describe_mesh(config.mesh)} to another mesh, and a step from there",
        run=lambda: _round_trip(harness, config),
    )
    if config.dtypes != harness.config.dtypes:
        yield Case(
            group="checkpoint",
            name=f"in {harness.config.dtypes.params}, bit for bit",
            run=lambda: _bits(harness, harness.config),
        )


def _round_trip(harness: Harness, config: TrainerConfig) -> Comparison:
    """Save after a step, restore elsewhere, step on both: the same numbers up to rounding.

    Raises:
      CheckFailed: for an array that came back otherwise, lies elsewhere than it should, or other
        rows.
    """
    program = harness.program(config)
    saved = program.run(harness.state_of(program), harness.rows).state
    host = jax.tree.map(np.asarray, saved)
    other = _elsewhere(harness, program)
    begun, following = _through_disk(program, other, saved)
    _check_bits(host, begun.state, other)
    rows = next(begun.batches)
    begun.batches.close()
    for name, x in following.items():
        if not np.array_equal(x, rows[name]):
            raise CheckFailed(f"the data continues with other rows than it would have (`{name}`)")
    expected = harness.expected("float32", following, host)
    found = harness.check_step(other, other.run(begun.state, rows), expected, rows)
    return found.then(
        harness.check_step(program, program.run(host, following), expected, following)
    )


def _bits(harness: Harness, config: TrainerConfig) -> str:
    """The state of the config as it is, through the disk to another mesh."""
    program = harness.program(config)
    saved = program.run(harness.state_of(program), harness.rows).state
    host = jax.tree.map(np.asarray, saved)
    other = _elsewhere(harness, program)
    begun, _ = _through_disk(program, other, saved)
    begun.batches.close()
    _check_bits(host, begun.state, other)
    return f"{len(jax.tree.leaves(host))} arrays, on {describe_mesh(other.config.mesh)}"


def _elsewhere(harness: Harness, program: Program) -> Program:
    """The program on a mesh that lays parameters out otherwise.

    Raises:
      CheckSkipped: when the model divides over no other.
    """
    config = program.config
    for sizes in _OTHERS:
        elsewhere = with_mesh(config, **sizes)
        mesh = elsewhere.mesh
        if math.prod(mesh.axis_sizes().values()) > DEVICES or mesh == config.mesh:
            continue
        try:
            other = harness.program(dataclasses.replace(elsewhere, accumulate=1))
        except ShardingError:
            continue
        if _layouts(other) != _layouts(program):
            return other
    raise CheckSkipped("the model divides over no other mesh of the devices here")


def _layouts(program: Program) -> list[tuple[int, ...]]:
    leaves = jax.tree.leaves(program.plain.abstract.params)
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]


def _through_disk(
    program: Program, other: Program, state: TrainState
) -> tuple[Start, dict[str, np.ndarray]]:
    """Where a run on `other` begins with what `program` saved; and the rows that come next."""
    batches = program.plain.parts.task.batches("train", Hosts())
    with tempfile.TemporaryDirectory(prefix="fornax-preflight-") as folder:
        config = program.config.checkpoint
        with Checkpointer(Path(folder) / "checkpoints", config) as checkpointer:
            next(batches)
            checkpointer.save(
                1,
                state=as_tree(state),
                data=batches.state(),
                config_yaml=dump_yaml(program.config),
                metadata={"total": 0.0},
                force=True,
            )
            following = next(batches)
            batches.close()
            return start(other.config, other.plain, checkpointer), following


def _check_bits(saved: TrainState, restored: TrainState, program: Program) -> None:
    """Every device holds the part of every array that its sharding says, bit for bit.

    Raises:
      CheckFailed: naming the first array that is not so.
    """
    want = flatten(as_tree(saved))
    specs = flatten(as_tree(program.plain.abstract))
    for path, array in flatten(as_tree(restored)).items():
        spec = specs[path]
        if not array.sharding.is_equivalent_to(spec.sharding, array.ndim):
            raise CheckFailed(
                f"{path} came back laid out as {array.sharding.spec} and belongs as "
                f"{spec.sharding.spec}"
            )
        places = spec.sharding.devices_indices_map(array.shape)
        for shard in array.addressable_shards:
            part = np.asarray(want[path])[places[shard.device]]
            if np.asarray(shard.data).tobytes() != part.tobytes():
                raise CheckFailed(
                    f"{path} came back with other contents than were saved, first on device "
                    f"{shard.device.id}"
                )
