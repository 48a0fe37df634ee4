"""What the processes of a run agree on: process 0 decides, or each says something and all receive
it.

The functions exchange through devices: all processes call them, in the same order, from the main
thread. With one process they cost nothing.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from fornax.config import errors
from fornax.config.errors import ClusterError, FornaxError, GroupLostError

__all__ = ["decide", "gather", "is_lost", "most", "share", "whole"]

T = TypeVar("T")

# Messages are padded to multiples of this, so that few exchanges are compiled.
_BLOCK = 1024

_LOST = re.compile(r"\bGloo\b|\bNCCL\b|^(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED):")


def decide(choose: Callable[[], T]) -> T:
    """What process 0 chooses, in every process; the others do not call `choose`.

    Args:
      choose: to something JSON-able. A `FornaxError` of it is raised in all processes.
    """
    if jax.process_count() == 1:
        return choose()
    if jax.process_index():
        said = _decoded(_broadcast(_encoded(None)))
        if "refused" in said:
            kind, message = said["refused"]
            raise getattr(errors, kind, ClusterError)(f"process 0: {message}")
        return said["chosen"]
    try:
        chosen = choose()
    except FornaxError as error:
        _broadcast(_encoded({"refused": [type(error).__name__, str(error)]}))
        raise
    _broadcast(_encoded({"chosen": chosen}))
    return chosen


def gather(value: object) -> list[Any]:
    """What each process says, JSON-able, process 0 first; the same list in every process."""
    if jax.process_count() == 1:
        return [value]
    said = _encoded(value)
    sizes = process_allgather(np.int32(said.size))
    padded = np.zeros(_padded(int(sizes.max())), np.uint8)
    padded[: said.size] = said
    rows = process_allgather(padded)
    return [_decoded(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def most(number: int) -> int:
    """The largest of the numbers that the processes give."""
    if jax.process_count() == 1:
        return number
    return int(process_allgather(np.int32(number)).max())


def share(data: bytes | None, source: int) -> bytes:
    """The bytes of process `source`, in every process; what the others give is not looked at."""
    if jax.process_count() == 1:
        assert data is not None
        return data
    mine = np.frombuffer(data or b"", np.uint8)
    return _broadcast(mine, source).tobytes()


def whole(array: jax.Array) -> np.ndarray:
    """All of an array of which each process holds a part, in every process."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(process_allgather(array, tiled=True))


def is_lost(error: BaseException) -> bool:
    """Whether an error came of another process that is gone, by itself or through what it began.

    Known by their texts, as jax has no type for it: those of Gloo (CPU) and NCCL (GPU), and the
    status codes of a coordination service that lost a process.
    """
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or each in seen:
            continue
        if isinstance(each, GroupLostError):
            return True
        if isinstance(each, jax.errors.JaxRuntimeError | ValueError) and _LOST.search(str(each)):
            return jax.process_count() > 1
        seen.append(each)
        pending += [each.__cause__, each.__context__]
    return False


def _broadcast(mine: np.ndarray, source: int = 0) -> np.ndarray:
    """The bytes of one process, uint8; those of the others are not looked at."""
    sends = jax.process_index() == source
    size = int(broadcast_one_to_all(np.int32(mine.size), is_source=sends))
    padded = np.zeros(_padded(size), np.uint8)
    if sends:
        padded[:size] = mine
    return np.asarray(broadcast_one_to_all(padded, is_source=sends))[:size]


def _encoded(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _decoded(data: np.ndarray) -> Any:
    return json.loads(data.astype(np.uint8).tobytes())


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
