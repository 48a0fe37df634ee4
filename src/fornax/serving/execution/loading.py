"""From a bundle to runners: weights on their devices, every bucket compiled, checked and timed.

Everything here blocks: it is called in a thread, while the event loop serves other models. A small
program runs on one thread where that is faster than on all of the processor's: two threads halve a
product of ten milliseconds and double one of fifty microseconds. Both ways must give the same bits,
or a bucket would answer otherwise than the function it holds.
"""

import dataclasses
import logging
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from fornax.export.buckets import assemble
from fornax.export.bundle import Bundle
from fornax.export.dtypes import numpy_dtype
from fornax.export.golden import examples
from fornax.export.placement import Placement
from fornax.export.program import Program
from fornax.export.spec import Signature
from fornax.export.undivided import Undivided, share_undivided
from fornax.export.weights import Weights
from fornax.serving.batching import Key, Waiting
from fornax.serving.execution.admission import Shapes
from fornax.serving.execution.devices import Place, Reservation, account_of, on_mesh
from fornax.serving.execution.group import OtherParts
from fornax.serving.execution.runner import Prepared, Runner, sample
from fornax.serving.settings import OnMesh

__all__ = ["Copy", "choose_threads", "load", "load_part", "weight_bytes"]

_log = logging.getLogger("fornax.serving")

CompilerOptions = Mapping[str, bool | int | float | str]
"""XLA's options by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MemoryUse:
    """Bytes that a version takes, over all its devices."""

    weights: int
    programs: int
    """Code of all its programs."""
    working: int
    """Inputs, outputs and temporaries of the batches under way, at their largest."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A model on one placement."""

    place: Place
    weights: Weights
    runners: Mapping[str, Runner]
    undivided: Undivided | None = None
    """What shares its weights with programs that are not divided over threads."""
    others: OtherParts | None = None
    """What other processes have of it."""

    def delete(self) -> None:
        """Give the weights' memory back; no program runs any more."""
        if self.others is not None:
            self.others.delete()
        if self.undivided is not None:
            self.undivided.delete()
        for array in self.weights.params.values():
            array.delete()


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of all weights, by the manifest."""
    return sum(
        math.prod(weight.shape) * numpy_dtype(weight.dtype).itemsize
        for weight in bundle.manifest.weights.values()
    )


def load(
    bundle: Bundle,
    places: Sequence[Place],
    reservation: Reservation,
    concurrency: int,
    options: CompilerOptions,
) -> list[Copy]:
    """Load a bundle onto its places, for this many batches at once, with XLA's compiler options.

    Raises:
      BundleError: for a bundle that is damaged, cannot run here, or computes something else.
      ServingError: RESOURCE_EXHAUSTED when it does not fit, with figures.
    """
    copies: list[Copy] = []
    others: list[OtherParts | None] = []
    with ThreadPoolExecutor(_threads(), thread_name_prefix="fornax-load") as pool:
        try:
            for place in places:
                others.append(None if place.others is None else place.others(bundle, options))
            weights = list(pool.map(lambda place: bundle.load_weights(place.placement), places))
            chosen = dict(options) or None
            placements = [place.placement for place in places]
            programs = _compile_all(bundle, placements, weights, pool, chosen)
            use, by_account = _memory(places, weights, programs, concurrency)
            reservation.change(
                by_account,
                f"weights {use.weights:,} B, programs {use.programs:,} B, batches under way "
                f"{use.working:,} B",
            )
            for place, held, mine, rest in zip(places, weights, programs, others, strict=True):
                if rest is not None:
                    rest.bind(_listed(mine))
                runners = {
                    name: _runner(bundle.signature(name), place, found)
                    for name, found in mine.items()
                }
                one = place.scheduler.on_host and len(place.devices) == 1
                undivided = share_undivided(held) if one else None
                copies.append(Copy(place, held, runners, undivided, rest))
                _prove(bundle, copies[-1], chosen)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            for each in others:
                if each is not None:
                    each.delete()
            raise
    return copies


def load_part(
    bundle: Bundle, mesh: OnMesh, options: CompilerOptions
) -> tuple[Weights, list[Program]]:
    """What another process than process 0 has of a bundle: see `group.Lay`.

    Raises:
      BundleError: for a bundle that is damaged or cannot run here.
    """
    placement = on_mesh(mesh, jax.devices())
    with ThreadPoolExecutor(_threads(), thread_name_prefix="fornax-load") as pool:
        weights = bundle.load_weights(placement)
        [found] = _compile_all(bundle, [placement], [weights], pool, dict(options) or None)
    return weights, _listed(found)


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


Programs = dict[str, dict[tuple[int, Key], Program]]


def _compile_all(
    bundle: Bundle,
    placements: Sequence[Placement],
    weights: Sequence[Weights],
    pool: ThreadPoolExecutor,
    options: CompilerOptions | None,
) -> list[Programs]:
    """For each placement, by function and bucket."""
    pending = [
        {
            name: {
                Shapes(bundle.signature(name)).bucket(dims): pool.submit(
                    bundle.compile, name, dims, held, placement, options=options
                )
                for dims in bundle.signature(name).shapes
            }
            for name in bundle.manifest.functions
        }
        for placement, held in zip(placements, weights, strict=True)
    ]
    return [
        {
            name: {bucket: future.result() for bucket, future in futures.items()}
            for name, futures in each.items()
        }
        for each in pending
    ]


def _listed(programs: Programs) -> list[Program]:
    """All programs, in an order that the bundle sets."""
    return [program for found in programs.values() for program in found.values()]


def _memory(
    places: Sequence[Place],
    weights: Sequence[Weights],
    programs: Sequence[Programs],
    concurrency: int,
) -> tuple[_MemoryUse, dict[str, int]]:
    total = _MemoryUse(weights=0, programs=0, working=0)
    by_account: dict[str, int] = {}
    for place, held, functions in zip(places, weights, programs, strict=True):
        every = [program.memory for found in functions.values() for program in found.values()]
        resident = _resident(held)
        largest = max(resident.values(), default=0)
        code = sum(memory.code for memory in every)
        working = concurrency * max(
            (
                memory.temporaries + memory.outputs + max(0, memory.arguments - largest)
                for memory in every
            ),
            default=0,
        )
        devices = len(place.own)
        total = _MemoryUse(
            weights=total.weights + sum(resident.values()),
            programs=total.programs + code * devices,
            working=total.working + working * devices,
        )
        for device in place.own:
            account = account_of(device)
            mine = resident.get(device, 0) + code + working
            by_account[account] = by_account.get(account, 0) + mine
    return total, by_account


def _resident(weights: Weights) -> dict[jax.Device, int]:
    """Bytes of weights by device."""
    found: dict[jax.Device, int] = {}
    for array in weights.params.values():
        for shard in array.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def _runner(
    signature: Signature, place: Place, programs: Mapping[tuple[int, Key], Program]
) -> Runner:
    prepared = {
        bucket: Prepared(program, program.dims, signature.volume(program.dims))
        for bucket, program in programs.items()
    }
    scheduler = place.scheduler
    return Runner(
        signature,
        prepared,
        on_host=scheduler.on_host,
        wait_inside=scheduler.on_host,
        lock=scheduler.lock,
    )


def _prove(bundle: Bundle, copy: Copy, options: CompilerOptions | None) -> None:
    """Compare golden outputs, then run every program, take its time, and have it run the faster
    way."""
    for name, runner in copy.runners.items():
        golden = bundle.manifest.functions[name].golden
        if golden is not None:
            bucket = Shapes(runner.signature).bucket(golden.dims)
            program = runner.prepared[bucket].program
            with runner.lock:
                bundle.check_golden(name, copy.weights, copy.place.placement, program)
        for (rows, key), prepared in runner.prepared.items():
            filled = Waiting(None, sample(runner.signature, prepared.dims), rows, key)
            runner.measure(rows, key, filled)
        if copy.undivided is not None:
            _speed_up(bundle, copy.undivided, runner, options)


def _speed_up(
    bundle: Bundle, undivided: Undivided, runner: Runner, options: CompilerOptions | None
) -> None:
    name = runner.signature.name
    try:
        count = choose_threads(bundle, undivided, runner, options)
    except Exception:  # what runs already runs as well without
        _log.exception("%s: its small programs could not be timed on one thread", name)
        return
    if count:
        every = len(runner.prepared)
        _log.info("%s: %d of %d programs run faster on one thread, and will", name, count, every)


TINY_SECONDS, SMALL_SECONDS = 40e-6, 2e-3
"""A program that takes less is too small for XLA to divide; one that takes longer always is."""
_FASTER = 0.9
"""An undivided program must take no more than this part of the time."""
_COMPARISONS = 24
_LONGEST = 0.05
"""Seconds for the runs of one program."""


def choose_threads(
    bundle: Bundle, undivided: Undivided, runner: Runner, options: CompilerOptions | None
) -> int:
    """Have each small program of a runner on one CPU device run the way that is faster.

    Args:
      undivided: shares the runner's weights.
      options: XLA's, as the programs were compiled with.

    Returns:
      how many are not divided.
    """
    chosen, name = 0, runner.signature.name
    for prepared in runner.prepared.values():
        if not TINY_SECONDS <= prepared.seconds <= SMALL_SECONDS:
            continue
        other = bundle.compile(
            name, prepared.dims, undivided.weights, undivided.placement, options=options
        )
        if _better(other, prepared, runner):
            prepared.program = other
            chosen += 1
    return chosen


def _better(other: Program, prepared: Prepared, runner: Runner) -> bool:
    signature, dims = runner.signature, prepared.dims
    inputs = assemble(signature, dims, examples(signature, dims))
    with runner.lock:
        if not _same(_run(prepared.program, inputs), _run(other, inputs)):
            return False
        divided: list[float] = []
        alone: list[float] = []
        until = time.monotonic() + _LONGEST
        while len(alone) < _COMPARISONS and (len(alone) < 3 or time.monotonic() < until):
            divided.append(_time(prepared.program, inputs))
            alone.append(_time(other, inputs))
    before, after = statistics.median(divided), statistics.median(alone)
    if after > _FASTER * before:
        return False
    prepared.seconds = min(alone)
    return True


def _time(program: Program, inputs: Mapping[str, np.ndarray]) -> float:
    start = time.perf_counter()
    _run(program, inputs)
    return time.perf_counter() - start


def _run(program: Program, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(each) for each in program.run(program.put(inputs))]


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
