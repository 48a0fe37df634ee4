"""Checks of rows: every host reads its own, and all of them together the global batch.

Legend: B rows of the global batch. Hosts that do not divide it hold padding at its end.
"""

from collections.abc import Iterator

import jax
import numpy as np

from fornax.preflight.harness import Case, CheckFailed, Harness
from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task
from fornax.train.hosts import data_shards, split_between
from fornax.train.session import prepare
from fornax.train.step import batch_shardings

__all__ = ["data"]

_HOSTS = (1, 2, 3, 4, 5)
_BATCHES = 3

Rows = dict[str, np.ndarray]


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
    config = harness.config
    whole = _read(config, Hosts())
    for batch in whole:
        _check_distinct(batch)
    held = _held(config, count)
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
        share = _read(config, hosts)
        for number, batch in enumerate(whole):
            _check_share(batch, share[number], hosts, process, number)
    read = sorted({hosts.index for hosts in parts.values()})
    if read != list(range(parts[0].count)):
        raise CheckFailed(f"the parts {read} of {parts[0].count} are read: rows are left out")
    return f"{_BATCHES} batches of {config.batch_size} rows, bit for bit, none twice"


def _read(config: TrainConfig, hosts: Hosts) -> list[Rows]:
    """The first batches of one host, as the trainer reads them."""
    batches = pretrain_task(config).batches("train", hosts)
    try:
        return [next(batches) for _ in range(_BATCHES)]
    finally:
        batches.close()


def _held(config: TrainConfig, count: int) -> dict[int, set[tuple[int, int]]]:
    """The spans of rows that the devices of each of `count` hosts hold: neighbours in the mesh.

    Hosts that do not divide the devices have one each and share rows only.
    """
    total = int(np.prod(list(config.mesh.axis_sizes().values())))
    if total % count:
        return {process: {(process, process + 1)} for process in range(count)}
    programs = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:total])
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


def _check_distinct(batch: Rows) -> None:
    """Documents are random, so that no two rows of a batch are equal unless one is read twice."""
    _, first, counts = np.unique(batch["tokens"], axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[counts > 1][0])
        raise CheckFailed(f"row {row} of a global batch stands in it {counts.max()} times")


def _check_share(batch: Rows, share: Rows, hosts: Hosts, process: int, number: int) -> None:
    """Part `hosts.index` of `hosts.count` equal ones of the global batch, zeros past its end."""
    size = -(-len(batch["tokens"]) // hosts.count)
    for name, x in batch.items():
        whole = np.concatenate([x, np.zeros((size * hosts.count - len(x), *x.shape[1:]), x.dtype)])
        want, got = whole[hosts.index * size : (hosts.index + 1) * size], share.get(name)
        if got is None or got.shape != want.shape:
            shape = None if got is None else got.shape
            raise CheckFailed(
                f"host {process} reads `{name}` of shape {shape}, its part is {want.shape}"
            )
        wrong = np.flatnonzero((got != want).any(axis=1))
        if wrong.size:
            row = hosts.index * size + int(wrong[0])
            copy = np.flatnonzero((x == got[wrong[0]]).all(axis=1))
            other = f"row {copy[0]}, another host's" if copy.size else "a row of no host"
            raise CheckFailed(
                f"host {process} should read row {row} of batch {number}, not {other}"
            )
