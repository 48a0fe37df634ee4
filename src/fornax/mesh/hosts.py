"""What the processes of a run agree on: process 0 decides, or each says something and all hear it.

The functions exchange through devices: all processes call them, in the same order, from the main
thread. With one process they cost nothing.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from fornax.config import errors
from fornax.config.errors import ClusterError, FornaxError

__all__ = ["decide", "gather", "most"]

T = TypeVar("T")

# Messages are padded to multiples of this, so that few exchanges are compiled.
_BLOCK = 1024


def decide(choose: Callable[[], T]) -> T:
    """What process 0 chooses, in every process; the others do not call `choose`.

    Args:
      choose: to something JSON-able. A `FornaxError` of it is raised in all processes.
    """
    if jax.process_count() == 1:
        return choose()
    if jax.process_index():
        said = _broadcast(None)
        if "refused" in said:
            kind, message = said["refused"]
            raise getattr(errors, kind, ClusterError)(f"process 0: {message}")
        return said["chosen"]
    try:
        chosen = choose()
    except FornaxError as error:
        _broadcast({"refused": [type(error).__name__, str(error)]})
        raise
    _broadcast({"chosen": chosen})
    return chosen


def gather(value: Any) -> list[Any]:
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


def _broadcast(value: Any) -> Any:
    """The value of process 0, JSON-able; what the others give is not looked at."""
    said = _encoded(value)
    size = int(broadcast_one_to_all(np.int32(said.size)))
    padded = np.zeros(_padded(size), np.uint8)
    if jax.process_index() == 0:
        padded[:size] = said
    return _decoded(np.asarray(broadcast_one_to_all(padded))[:size])


def _encoded(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _decoded(data: np.ndarray) -> Any:
    return json.loads(data.astype(np.uint8).tobytes())


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
