"""Questions about rows: every host reads its own, and all of them together the global batch.

Legend: B rows of the global batch.
"""

from collections.abc import Iterator

import jax
import numpy as np

from fornax.plan.preflight.lab import Failed, Lab, NotUsed
from fornax.plan.preflight.question import Question
from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task
from fornax.train.hosts import split_between
from fornax.train.session import prepare
from fornax.train.step import batch_shardings

__all__ = ["data"]

_HOSTS = (1, 2, 4)
_BATCHES = 3

Rows = dict[str, np.ndarray]


def data(lab: Lab) -> Iterator[Question]:
    """One question for each number of hosts."""
    for count in _HOSTS:
        yield Question(
            group="data",
            name=f"rows of {count} host{'s' if count > 1 else ''}",
            ask=lambda count=count: _rows(lab, count),
        )


def _rows(lab: Lab, count: int) -> str:
    """Compare what `count` hosts read with the global batch.

    Raises:
      Failed: for rows that are missing, wrong, or read twice.
      NotUsed: when the devices or the virtual shards do not divide over so many hosts.
    """
    config = lab.config
    devices = int(np.prod(list(config.mesh.axis_sizes().values())))
    if count > 1 and (devices % count or config.data.virtual_shards % count):
        raise NotUsed(
            f"{devices} devices and {config.data.virtual_shards} virtual shards do not both divide "
            f"over {count} hosts"
        )
    whole = _read(config, Hosts())
    for batch in whole:
        _check_distinct(batch)
    held = _held(config, count)
    parts = {p: split_between(held, config.batch_size, p) for p in held}
    for process, hosts in parts.items():
        twin = next(p for p in held if held[p] == held[process])
        if parts[twin] != hosts:
            raise Failed(f"hosts {twin} and {process} hold the same rows and read different ones")
        own = sum(stop - start for start, stop in held[process])
        share = _read(config, hosts)
        for number, batch in enumerate(whole):
            _check_share(batch, share[number], hosts, own, process, number)
    read = sorted({hosts.index for hosts in parts.values()})
    if read != list(range(parts[0].count)):
        raise Failed(f"the parts {read} of {parts[0].count} are read: rows are left out")
    return f"{_BATCHES} batches of {config.batch_size} rows, bit for bit, none twice"


def _read(config: TrainConfig, hosts: Hosts) -> list[Rows]:
    """The first batches of one host, as the trainer reads them."""
    batches = pretrain_task(config).batches("train", hosts)
    try:
        return [next(batches) for _ in range(_BATCHES)]
    finally:
        batches.close()


def _held(config: TrainConfig, count: int) -> dict[int, set[tuple[int, int]]]:
    """The spans of rows that the devices of each of `count` hosts hold: neighbours in the mesh."""
    total = int(np.prod(list(config.mesh.axis_sizes().values())))
    programs = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:total])
    mesh, rules = programs.parts.mesh, programs.parts.rules
    rows = jax.ShapeDtypeStruct((config.batch_size,), np.int32)
    where = batch_shardings({"rows": rows}, mesh, rules)["rows"]
    spans = where.devices_indices_map((config.batch_size,))
    held: dict[int, set[tuple[int, int]]] = {process: set() for process in range(count)}
    for number, device in enumerate(mesh.devices.flat):
        start, stop, _ = spans[device][0].indices(config.batch_size)
        held[number * count // total].add((start, stop))
    return held


def _check_distinct(batch: Rows) -> None:
    """Documents are random, so that no two rows of a batch are equal unless one is read twice."""
    _, first, counts = np.unique(batch["tokens"], axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[counts > 1][0])
        raise Failed(f"row {row} of a global batch stands in it {counts.max()} times")


def _check_share(
    batch: Rows, share: Rows, hosts: Hosts, own: int, process: int, number: int
) -> None:
    """Part `hosts.index` of the global batch, as many rows as the host's devices hold (`own`)."""
    size = len(batch["tokens"]) // hosts.count
    for name, x in batch.items():
        want, got = x[hosts.index * size : (hosts.index + 1) * size], share.get(name)
        if got is None or got.shape != want.shape or len(got) != own:
            shape = None if got is None else got.shape
            raise Failed(
                f"host {process} reads `{name}` of shape {shape}, its part is {want.shape}, and "
                f"its devices hold {own} rows"
            )
        wrong = np.flatnonzero((got != want).any(axis=1))
        if wrong.size:
            row = hosts.index * size + int(wrong[0])
            copy = np.flatnonzero((x == got[wrong[0]]).all(axis=1))
            other = f"row {copy[0]}, another host's" if copy.size else "a row of no host"
            raise Failed(f"host {process} should read row {row} of batch {number}, not {other}")
