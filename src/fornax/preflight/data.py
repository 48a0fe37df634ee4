"""Checks of rows: every host reads its own, and all of them together the global batch.

Legend: B rows of the global batch. Hosts that do not divide it hold padding at its end.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fornax.preflight.harness import Case, CheckFailed, Harness
from fornax.preflight.subject import Rows, Subject
from fornax.train import Hosts, Ledger, Task, TrainerConfig
from fornax.train.hosts import data_shards, split_between
from fornax.train.session import prepare
from fornax.train.step import batch_shardings

__all__ = ["data"]

_HOSTS = (1, 2, 3, 4, 5)
_BATCHES = 3


def data(harness: Harness) -> Iterator[Case]:
    """One check for each number of hosts."""
    for count in _HOSTS:
        yield Case(
            group="data",
            name=f"rows of {count} host{'s' if count > 1 else ''}",
            run=lambda count=count: _rows(harness, count),
        )


def _rows(harness: Harness, count: int) -> str:
    """Compare what `count` hosts read with the global batch.

    Raises:
      CheckFailed: for rows that are missing, wrong, or read twice.
    """
    config, subject = harness.config, harness.subject
    task = subject.task(config)
    whole = _read(task, Hosts())
    for batch in whole:
        _check_distinct(batch[subject.content])
    held = _held(config, task, count)
    parts = {p: split_between(held, _total(held), p) for p in held}
    for process, hosts in parts.items():
        twin = next(p for p in held if held[p] == held[process])
        if parts[twin] != hosts:
            raise CheckFailed(
                f"hosts {twin} and {process} hold the same rows and read different ones"
            )
        own = sum(stop - start for start, stop in held[process])
        if own * hosts.count != _total(held):
            raise CheckFailed(
                f"host {process} reads one of {hosts.count} equal parts of a batch, and its "
                f"devices hold {own} of {_total(held)}"
            )
        share = _read(task, hosts)
        for number, batch in enumerate(whole):
            _check_share(batch, share[number], hosts, subject, where=(process, number))
    read = sorted({hosts.index for hosts in parts.values()})
    if read != list(range(parts[0].count)):
        raise CheckFailed(f"the parts {read} of {parts[0].count} are read: rows are left out")
    return f"{_BATCHES} batches of {config.batch_size} rows, bit for bit, none twice"


def _read(task: Task[Any], hosts: Hosts) -> list[Rows]:
    """The first batches of one host, as the trainer reads them."""
    batches = task.batches("train", hosts)
    try:
        return [next(batches) for _ in range(_BATCHES)]
    finally:
        batches.close()


def _held(config: TrainerConfig, task: Task[Any], count: int) -> dict[int, set[tuple[int, int]]]:
    """The spans of rows that the devices of each of `count` hosts hold: neighbours in the mesh.

    Hosts that do not divide the devices have one each and share rows only.
    """
    total = int(np.prod(list(config.mesh.axis_sizes().values())))
    if total % count:
        return {process: {(process, process + 1)} for process in range(count)}
    programs = prepare(config, task, Ledger(), jax.devices()[:total])
    mesh, rules = programs.parts.mesh, programs.parts.rules
    shape = (data_shards(mesh.shape, rules),)
    where = batch_shardings({"rows": jax.ShapeDtypeStruct(shape, np.int32)}, mesh, rules)["rows"]
    spans = where.devices_indices_map(shape)
    held: dict[int, set[tuple[int, int]]] = {process: set() for process in range(count)}
    for number, device in enumerate(mesh.devices.flat):
        start, stop, _ = spans[device][0].indices(shape[0])
        held[number * count // total].add((start, stop))
    return held


def _total(held: dict[int, set[tuple[int, int]]]) -> int:
    return max(stop for spans in held.values() for _, stop in spans)


def _check_distinct(rows: np.ndarray) -> None:
    """Examples are random, so that no two rows of a batch are equal unless one is read twice."""
    _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[counts > 1][0])
        raise CheckFailed(f"row {row} of a global batch occurs in it {counts.max()} times")


def _check_share(
    batch: Rows, share: Rows, hosts: Hosts, subject: Subject, where: tuple[int, int]
) -> None:
    """Part `hosts.index` of `hosts.count` equal ones of the global batch; nothing past its end."""
    process, number = where
    total = len(batch[subject.content])
    size = -(-total // hosts.count)
    rows = np.arange(hosts.index * size, (hosts.index + 1) * size)
    real = rows < total
    for name, x in batch.items():
        got, shape = share.get(name), (size, *x.shape[1:])
        if got is None or got.shape != shape:
            found = None if got is None else got.shape
            raise CheckFailed(
                f"host {process} reads `{name}` of shape {found}, its part is {shape}"
            )
        if (subject.zeros is None or name in subject.zeros) and got[~real].any():
            raise CheckFailed(f"host {process} reads `{name}` past the end of batch {number}")
        wrong = np.flatnonzero(_differ(got[real], x[rows[real]]))
        if wrong.size:
            copy = np.flatnonzero(~_differ(x, got[wrong[0]][None]))
            other = f"row {copy[0]}, another host's" if copy.size else "a row of no host"
            raise CheckFailed(
                f"host {process} should read row {rows[wrong[0]]} of batch {number}, not {other}"
            )


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which rows differ in any place."""
    return (a != b).any(axis=tuple(range(1, a.ndim)))
