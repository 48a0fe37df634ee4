"""What the processes of a run must have in common before the first step; else none trains.

A process with other code, another state or another position in the data would train on without an
error: the collectives only add its numbers in.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fornax.config.errors import ClusterError
from fornax.mesh import hosts, path_name
from fornax.train.state import TrainState, as_tree

__all__ = ["agree", "differences"]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain")
_ROOT = Path(__file__).parents[1]


def agree(step: int, state: TrainState, position: Mapping[int, object]) -> None:
    """Compare processes before their first step: devices, code, step, state, data position.

    Every part of an array, and every virtual shard of the data, is compared between the processes
    that hold it; parts that one process alone holds have nothing to be compared with.

    Raises:
      ClusterError: in every process, naming those that differ from process 0, and in what.
    """
    if jax.process_count() == 1:
        return
    said = {
        "the number of devices": {"": str(jax.local_device_count())},
        "the code": {"": code_digest()},
        "the step": {"": str(step)},
        "the state": state_digests(state),
        "the data position": {str(k): _digest_json(v) for k, v in position.items()},
    }
    found = differences(hosts.gather(said))
    if found:
        raise ClusterError(
            f"the processes do not agree, so none trains: {'; '.join(found)}. Give all of them the "
            "same Fornax and packages, one run directory on storage that they share, and as many "
            "devices each"
        )


def differences(said: Sequence[Mapping[str, Mapping[str, str]]]) -> list[str]:
    """Who differs in what from the first process that said something of it, a line each.

    Args:
      said: of each process, by topic, what it holds and its digest or value.
    """
    found = []
    for topic in said[0]:
        first: dict[str, tuple[int, str]] = {}
        for number, every in enumerate(said):
            for part, value in every[topic].items():
                owner, expected = first.setdefault(part, (number, value))
                if value != expected:
                    where = f" of part {part}" if part else ""
                    found.append(
                        f"process {number} differs from process {owner} in {topic}{where} "
                        f"({value} and {expected})"
                    )
                    break
    return found


def state_digests(state: TrainState) -> dict[str, str]:
    """A digest for each part of the arrays that this process's devices hold.

    Parts of arrays of one shape and layout share a digest: a process that holds that part of one of
    them holds it of all.
    """
    digests: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(as_tree(state)):
        layout = getattr(leaf.sharding, "spec", "")
        held = {_span(shard.index): shard.data for shard in leaf.addressable_shards}
        for span, data in sorted(held.items()):
            part = f"[{span}] of {leaf.shape} {layout}"
            digest = digests.setdefault(part, hashlib.blake2b(digest_size=8))
            digest.update(path_name(path).encode())
            digest.update(np.atleast_1d(np.asarray(data)).reshape(-1).view(np.uint8).data)
    return {part: digest.hexdigest() for part, digest in digests.items()}


def _span(index: tuple[slice, ...]) -> str:
    """`0:32, :` for the slices of a shard."""
    return ", ".join(":" if s.start is None else f"{s.start}:{s.stop}" for s in index)


def code_digest() -> str:
    """A digest of Fornax's own files and the versions of what computes for it."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(_ROOT.rglob("*.py")):
        digest.update(str(file.relative_to(_ROOT)).encode())
        digest.update(file.read_bytes())
    for name in _PACKAGES:
        digest.update(f"{name} {metadata.version(name)}".encode())
    return digest.hexdigest()


def _digest_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
