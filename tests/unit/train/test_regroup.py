"""Arrays from the parts of another division, against the arrays that were divided."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from isal.isal_zlib import crc32
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fornax.config.errors import CheckpointError
from fornax.train.regroup import Held, complete_steps, gathered

ARRAYS = {
    "both": (np.arange(96.0, dtype=np.float32).reshape(8, 12), P("a", "b"), P(None, "b")),
    "rows": (np.arange(40, dtype=np.int32).reshape(8, 5), P("a"), P(("b", "a"))),
    "all": (np.arange(7.0, dtype=np.float16), P(), P()),
    "number": (np.float32(3.5), P(), P()),
    "none": (np.zeros((0, 4), np.float32), P(), P()),
}


def mesh(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), ("a", "b"))


def divided(processes: int) -> list[Held]:
    """What each of some processes, of two devices each, would have kept of ARRAYS."""
    before = mesh(processes, 2)
    held = []
    for process in range(processes):
        memory, parts, at = mmap.mmap(-1, 1 << 14), [], 64
        for value, spec, _ in ARRAYS.values():
            array = jax.device_put(value, NamedSharding(before, spec))
            mine: dict[str, list] = {}
            for shard in array.addressable_shards:
                if shard.device in before.devices[process] and str(shard.index) not in mine:
                    part = np.asarray(shard.data)
                    memory[at : at + part.nbytes] = part.tobytes()
                    crc = crc32(part.tobytes())
                    mine[str(shard.index)] = [at, list(part.shape), str(part.dtype), crc]
                    at += -(-part.nbytes // 64) * 64
            parts.append(mine)
        held.append(Held(step=3, process=process, processes=processes, memory=memory, parts=parts))
    return held


def abstract() -> dict[str, jax.ShapeDtypeStruct]:
    now = mesh(2, 4)
    return {
        name: jax.ShapeDtypeStruct(np.shape(value), value.dtype, sharding=NamedSharding(now, after))
        for name, (value, _, after) in ARRAYS.items()
    }


def ordered(held: Sequence[Held]) -> list[Held]:
    """With the arrays in a tree's order."""
    names = list(ARRAYS)
    order = [names.index(name) for name in sorted(names)]
    return [
        Held(
            step=each.step,
            process=each.process,
            processes=each.processes,
            memory=each.memory,
            parts=[each.parts[number] for number in order],
        )
        for each in held
    ]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_arrays_are_what_was_divided(processes: int, tmp_path: Path):
    held = ordered(divided(processes))
    (given,) = complete_steps(held).values()
    assert given == held
    found = gathered(given, abstract(), tmp_path)
    for name, (value, _, after) in ARRAYS.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].sharding.spec == after


def test_a_step_of_which_a_part_is_missing_is_none_to_go_on_from():
    held = divided(4)
    assert complete_steps(held[:3]) == {}
    assert list(complete_steps(held)) == [3]


def test_a_part_that_changed_is_refused(tmp_path: Path):
    held = ordered(divided(2))
    held[1].memory[64:68] = b"\0\1\2\3"
    with pytest.raises(CheckpointError, match="damaged"):
        gathered(held, abstract(), tmp_path)
