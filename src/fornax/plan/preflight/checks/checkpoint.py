"""Questions about a checkpoint: saved on one mesh, restored on another, it is the same run.

Saving and restoring are the trainer's: `Checkpointer.save` of what the loop saves, and
`train.session.start`.
"""

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fornax.checkpoint import Checkpointer
from fornax.config import ShardingError, dump_yaml
from fornax.mesh import MeshConfig
from fornax.optim.tree import flatten
from fornax.plan.preflight.checks.numerics import shown
from fornax.plan.preflight.compare import Comparison
from fornax.plan.preflight.lab import Failed, Lab, NotUsed
from fornax.plan.preflight.programs import Program
from fornax.plan.preflight.question import Question
from fornax.plan.preflight.shrink import DEVICES, float32
from fornax.train import Hosts, TrainConfig
from fornax.train.session import Start, start
from fornax.train.state import TrainState, as_tree

__all__ = ["checkpoint"]

_OTHERS = ({"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "data": 4}, {"data": 8}, {"fsdp": 2})


def checkpoint(lab: Lab) -> Iterator[Question]:
    """The round trip in float32 with a step after it; bits alone in the config's own dtypes."""
    config = float32(lab.config)
    yield Question(
        group="checkpoint",
        name=f"from {shown(config.mesh)} to another mesh, and a step from there",
        ask=lambda: _round_trip(lab, config),
    )
    if config.dtypes != lab.config.dtypes:
        yield Question(
            group="checkpoint",
            name=f"in {lab.config.dtypes.params}, bit for bit",
            ask=lambda: _bits(lab, lab.config),
        )


def _round_trip(lab: Lab, config: TrainConfig) -> Comparison:
    """Save after a step, restore elsewhere, step on both: the same numbers up to rounding.

    Raises:
      Failed: for an array that came back otherwise, lies elsewhere than it should, or other rows.
    """
    program = lab.program(config)
    saved = program.run(lab.state, lab.rows).state
    host = jax.tree.map(np.asarray, saved)
    other = _elsewhere(lab, program)
    begun, following = _through_disk(program, other, saved)
    _check_bits(host, begun.state, other)
    rows = next(begun.batches)
    begun.batches.close()
    for name, x in following.items():
        if not np.array_equal(x, rows[name]):
            raise Failed(f"the data goes on with other rows than it would have (`{name}`)")
    expected = lab.expected("float32", following, host.params)
    found = lab.judge(other, other.run(begun.state, rows), expected, rows)
    return found.then(lab.judge(program, program.run(host, following), expected, following))


def _bits(lab: Lab, config: TrainConfig) -> str:
    """The state of the config as it is, through the disk to another mesh."""
    program = lab.program(config)
    saved = program.run(lab.state, lab.rows).state
    host = jax.tree.map(np.asarray, saved)
    other = _elsewhere(lab, program)
    begun, _ = _through_disk(program, other, saved)
    begun.batches.close()
    _check_bits(host, begun.state, other)
    return f"{len(jax.tree.leaves(host))} arrays, on {shown(other.config.mesh)}"


def _elsewhere(lab: Lab, program: Program) -> Program:
    """The program on a mesh that lays parameters out otherwise.

    Raises:
      NotUsed: when the model divides over no other.
    """
    config = program.config
    for sizes in _OTHERS:
        mesh = MeshConfig(**{"fsdp": 1, **sizes}, rules=config.mesh.rules)
        if math.prod(mesh.axis_sizes().values()) > DEVICES or mesh == config.mesh:
            continue
        try:
            other = lab.program(dataclasses.replace(config, mesh=mesh, accumulate=1))
        except ShardingError:
            continue
        if _layouts(other) != _layouts(program):
            return other
    raise NotUsed("the model divides over no other mesh of the devices here")


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
      Failed: naming the first array that is not so.
    """
    want = flatten(as_tree(saved))
    specs = flatten(as_tree(program.plain.abstract))
    for path, array in flatten(as_tree(restored)).items():
        spec: Any = specs[path]
        if not array.sharding.is_equivalent_to(spec.sharding, array.ndim):
            raise Failed(
                f"{path} came back laid out as {array.sharding.spec} and belongs as "
                f"{spec.sharding.spec}"
            )
        places = spec.sharding.devices_indices_map(array.shape)
        for shard in array.addressable_shards:
            part = np.asarray(want[path])[places[shard.device]]
            if np.asarray(shard.data).tobytes() != part.tobytes():
                raise Failed(
                    f"{path} came back with other contents than were saved, first on device "
                    f"{shard.device.id}"
                )
