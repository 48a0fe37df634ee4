"""A slice's part in a DiLoCo run: begin with the others, exchange fragments in turn, catch up.

Every rank of a slice exchanges its own devices' blocks of a fragment with the same rank of the
other slices, so the ranks of a slice share the bytes. They agree on an outcome before they use it.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from fornax.config.frames import Frame, Kind, LinkError
from fornax.mesh import hosts
from fornax.train.diloco.config import DilocoConfig
from fornax.train.diloco.link import Link
from fornax.train.diloco.outer import OuterOptimizer, OuterState
from fornax.train.state import TrainState, as_tree

__all__ = ["SliceSync", "exchanged_rows", "pack", "unpack"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Flight:
    """An exchange that has begun."""

    number: int
    fragment: int
    ends: int
    """The step after which it is taken in."""
    result: Future[Frame]


class SliceSync:
    """The outer loop of one process; `outer` and the train state it is given are at one step."""

    def __init__(self, config: DilocoConfig, optimizer: OuterOptimizer, link: Link) -> None:
        """Exchange nothing yet.

        Args:
          config: what the user said.
          optimizer: the outer step.
          link: to the exchange.
        """
        self._config, self._optimizer, self._link = config, optimizer, link
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._flight: _Flight | None = None
        self._feeds = False
        """Whether another slice is to get this one's state."""
        self._join: Callable[[], int | None] | None = None
        self.outer: OuterState = {}
        self.stop = False
        """Whether all slices were asked to stop after the last exchange."""
        self.numbers: dict[str, float] = {}
        """Of the latest exchange: `exchange_bytes` of this process, `exchange_seconds` that the
        step waited, `slices` that took part."""

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has begun that is not taken in: no checkpoint is made meanwhile."""
        return self._flight is not None

    def begin(
        self,
        steps: Callable[[], Sequence[int]],
        same: Mapping[str, str],
        load: Callable[[int | None], tuple[TrainState, int, OuterState | None]],
    ) -> tuple[TrainState, int, bool]:
        """Begin where all slices can, or take over from those that train.

        Args:
          steps: to the checkpoints there are.
          same: what all slices must have in common.
          load: from a checkpoint's step (0: the beginning; None: the newest there is) to the state,
            its step, and the outer state, None where the run begins.

        Returns:
          The state to begin with, its step, and whether it is another slice's.

        Raises:
          ClusterError: when the slices do not fit together, or the exchange cannot be reached.
        """
        self._join = lambda: self._link.join([0, *steps()], same)
        while True:
            with suppress(LinkError):
                place = _agreed(self._join)
                state, step, outer = load(place)
                self.outer = self._optimizer.init(state.params) if outer is None else outer
                return self._enter(state, step)

    def _enter(self, state: TrainState, step: int) -> tuple[TrainState, int, bool]:
        """Say that the state is loaded, and take over another's if that is the answer."""
        answer = _agreed(lambda: self._link.ready(_digest(self.outer["params"])))
        if answer.kind is Kind.GO:
            return state, step, False
        tree = unpack({"state": as_tree(state), "outer": self.outer}, answer.body)
        self.outer = tree["outer"]
        taken = TrainState(**tree["state"])
        params = self._optimizer.common(self.outer, taken.params)
        return replace(taken, params=params, rng=state.rng), int(answer.facts["step"]), True

    def after_step(self, step: int, state: TrainState, *, last: bool) -> tuple[TrainState, int]:
        """Begin and take in what is due after `step`; `state` is given up.

        Args:
          step: the step that was just made.
          state: the state after it.
          last: whether the run ends here: every fragment is exchanged, so that all slices end with
            the same parameters.

        Returns:
          The state and the step to resume from: later ones where this slice had been left out and
          caught up.
        """
        self.numbers = {}
        alpha = self._config.fragment_update_alpha
        number = self._config.due(step)
        if number is not None and not last:
            self._launch(step, number, self._config.fragment_sync_delay, state)
        if self._flight is not None and (last or self._flight.ends <= step):
            state, step = self._land(step, state, alpha)
        for number in range(self._config.num_fragments if last else 0):
            self._launch(step, number, 0, state)
            state, step = self._land(step, state, 0.0)
        if self._feeds:
            self._feeds = False
            body = pack({"state": as_tree(state), "outer": self.outer})
            self._thread.submit(self._link.send, Kind.STATE, facts={"step": step}, body=body)
        return state, step

    def settle(self, step: int, state: TrainState) -> tuple[TrainState, int]:
        """Take in the exchange in flight, if there is one, before its time."""
        if self._flight is None:
            return state, step
        return self._land(step, state, self._config.fragment_update_alpha)

    def finish(self, *, done: bool) -> None:
        """Leave; `done` when the run is: the others need not wait for this slice to return."""
        with suppress(LinkError):
            self._thread.submit(self._link.send, Kind.BYE, facts={"done": done}).result()
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._link.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _launch(self, step: int, number: int, delay: int, state: TrainState) -> None:
        """Begin to exchange a fragment; the copy to the host and the sending continue beside
        steps."""
        rows = self._optimizer.contribution(self.outer, state.params, number)
        jax.block_until_ready(rows)  # steps give up the parameters that it is made of
        round_ = step * self._config.num_fragments + number
        result = self._thread.submit(lambda: self._link.exchange(round_, exchanged_rows(rows)))
        self._flight = _Flight(round_, number, step + delay, result)

    def _land(self, step: int, state: TrainState, alpha: float) -> tuple[TrainState, int]:
        """Wait for the exchange in flight, and make the outer step."""
        flight, self._flight = self._flight, None
        assert flight is not None
        begun = time.perf_counter()
        try:
            result = _agreed(flight.result.result)
        except LinkError:
            return self._rejoin(state, step)
        waited = time.perf_counter() - begun
        members: list[int] = result.facts["members"]
        gathered, weights = self._gathered(flight.fragment, members, memoryview(result.body))
        self.outer, params = self._optimizer.apply(
            self.outer, state.params, flight.fragment, gathered, weights, alpha
        )
        state = replace(state, params=params)
        self.stop = self.stop or bool(result.facts["stop"])
        each = len(result.body) // len(members)
        self.numbers = {
            "exchange_bytes": self.numbers.get("exchange_bytes", 0) + each * (len(members) + 1),
            "exchange_seconds": self.numbers.get("exchange_seconds", 0.0) + waited,
            "slices": len(members),
        }
        self._feeds = self._feeds or result.facts["donor"] == self._link.place.index
        return state, step

    def _gathered(
        self, number: int, members: Sequence[int], body: memoryview
    ) -> tuple[jax.Array, jax.Array]:
        """What the members sent, uint8 [S, R, W], and their weights, float32 [S]."""
        sharding, count = self._optimizer.gathered, self._link.place.count
        shape = (count, *self._optimizer.row_shape(number))
        places = sharding.addressable_devices_indices_map(shape)
        spans = {d: _span(index, shape[1]) for d, index in places.items()}
        rows = sum(stop - start for start, stop in spans.values())
        local = np.zeros((count, rows, shape[2]), np.uint8)
        each = np.frombuffer(body, np.uint8).reshape(len(members), rows, shape[2])
        local[list(members)] = each
        pieces, at = [], 0
        for device, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            part = local[:, at : at + stop - start]
            pieces.append(jax.device_put(part, device))
            at += stop - start
        gathered = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
        weights = np.zeros(count, np.float32)
        weights[list(members)] = 1
        return gathered, jnp.asarray(weights)

    def _rejoin(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """After the others continued without this slice: take over from them.

        Raises:
          LinkError: when none of them trains any more: all begin again, from checkpoints.
        """
        assert self._join is not None
        self._feeds = False
        if _agreed(self._join) is not None:
            raise LinkError(
                "no other slice trains any more; start this one again, from its checkpoint"
            )
        return self._enter(state, step)[:2]


def _span(index: tuple[slice, ...] | None, size: int) -> tuple[int, int]:
    """First and last + 1 of the second dimension."""
    assert index is not None
    return index[1].indices(size)[:2]


def exchanged_rows(rows_RW: jax.Array) -> bytes:
    """This process's part of uint8 [R, W], in the order of R."""
    parts = {
        shard.index[0].indices(rows_RW.shape[0])[0]: shard for shard in rows_RW.addressable_shards
    }
    return b"".join(np.asarray(parts[start].data).tobytes() for start in sorted(parts))


def pack(tree: object) -> bytes:
    """This process's parts of all arrays of a tree, each once, one after the other."""
    return b"".join(
        np.ascontiguousarray(part).tobytes()
        for leaf in jax.tree.leaves(tree)
        for part in _parts(leaf)
    )


def unpack(like: Any, body: bytes | bytearray | memoryview) -> Any:
    """The tree whose arrays `pack` gave, laid out as those of `like`.

    Raises:
      LinkError: when it is another's.
    """
    view, at = memoryview(body), 0
    leaves, structure = jax.tree.flatten(like)
    found = []
    for leaf in leaves:
        spans = _spans(leaf)
        data: dict[str, np.ndarray] = {}
        for name, shape in spans.items():
            size = int(np.prod(shape)) * leaf.dtype.itemsize
            part = view[at : at + size]
            if len(part) < size:
                raise LinkError("the state of the other slice is shorter than this one's")
            data[name] = np.frombuffer(part, leaf.dtype).reshape(shape)
            at += size
        kind = leaf.sharding.memory_kind
        pieces = [
            jax.device_put(
                data[str(shard.index)],
                SingleDeviceSharding(shard.device, memory_kind=kind),
                may_alias=False,  # steps give them up
            )
            for shard in leaf.addressable_shards
        ]
        found.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces))
    if at != len(view):
        raise LinkError("the state of the other slice is longer than this one's")
    return jax.tree.unflatten(structure, found)


def _spans(leaf: jax.Array) -> dict[str, tuple[int, ...]]:
    """This process's parts of an array: their place and shape, in one order on every slice."""
    return {str(shard.index): shard.data.shape for shard in leaf.addressable_shards}


def _parts(leaf: jax.Array) -> list[np.ndarray]:
    held = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    return [np.asarray(data) for data in held.values()]


def _digest(tree: object) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(tree):
        for part in _parts(leaf):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _agreed(ask: Callable[[], T]) -> T:
    """What `ask` gives, if every rank of the slice got an answer.

    Raises:
      LinkError: in every rank, when one of them lost its connection.
    """
    answer, failure = None, None
    try:
        answer = ask()
    except LinkError as error:
        failure = error
    if not all(hosts.gather(failure is None)):
        raise failure or LinkError("another rank of the slice lost its connection")
    return answer  # pyrefly: ignore[bad-return]
