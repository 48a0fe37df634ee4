"""The state of a group from the snapshots of another, of more or fewer processes.

A host that is lost and not replaced leaves a group that is smaller. Its snapshots are in the memory
of another host, so those that are left hold all of the state between them, divided as the group
before divided it. Each writes what it holds, own or replica, into a directory that all share; then
each reads the parts that it needs. Nothing is exchanged where one process is left.
"""

import contextlib
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from isal.isal_zlib import crc32

from fornax.config.errors import CheckpointError
from fornax.mesh import hosts
from fornax.train.snapshot import Snapshot

__all__ = ["Held", "Piece", "complete_steps", "gathered"]

_SLICE = re.compile(r"slice\((\w+), (\w+), None\)")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A whole snapshot of one process of a group, where this process can read it."""

    step: int
    process: int
    """Whose it is, in its group."""
    processes: int
    """How many that group had."""
    memory: mmap.mmap
    parts: list[dict[str, list[Any]]]
    """Of each array the parts by their place: offset, shape, dtype, CRC-32."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an array."""

    begin: tuple[int, ...]
    """Its first element's index in the array."""
    values: np.ndarray
    crc: int


def complete_steps(held: Sequence[Held]) -> dict[int, list[Held]]:
    """The steps of which all processes together hold every part; all call it.

    Args:
      held: what this process can read.

    Returns:
      By step, those of `held` that this process is to give to the others: each part is given by one
      process.
    """
    names = [(each.step, each.processes, each.process) for each in held]
    first: dict[tuple[int, int, int], int] = {}
    for process, said in enumerate(hosts.gather(names)):
        for name in said:
            first.setdefault(tuple(name), process)
    found: dict[int, list[Held]] = {}
    for step, processes in sorted({name[:2] for name in first}):
        if all((step, processes, each) in first for each in range(processes)):
            found[step] = [
                each
                for each, name in zip(held, names, strict=True)
                if name[:2] == (step, processes) and first[name] == jax.process_index()
            ]
    return found


def gathered(mine: Sequence[Held], abstract: object, directory: Path) -> Any:
    """The tree like `abstract`, from what all processes give; all call it.

    Args:
      mine: what this one gives, of a step of `complete_steps`.
      abstract: tree of ShapeDtypeStructs with shardings.
      directory: of all processes, for as long as this takes.

    Raises:
      CheckpointError: in a process that finds a part damaged, or cannot write or read there.
    """
    with contextlib.ExitStack() as stack:
        given = mine if jax.process_count() == 1 else _exchanged(mine, directory, stack)
        leaves = jax.tree.leaves(abstract)
        parts = [
            _parts(leaf, [_pieces(each, number) for each in given])
            for number, leaf in enumerate(leaves)
        ]
        tree = Snapshot.of_parts(abstract, parts).arrays()
        jax.block_until_ready(tree)
        hosts.gather(None)  # all have read
    return tree


def _exchanged(mine: Sequence[Held], directory: Path, stack: contextlib.ExitStack) -> list[Held]:
    """What all processes give, in files of the directory."""
    try:
        stack.callback(_remove, directory)
        directory.mkdir(parents=True, exist_ok=True)
        for each in mine:
            path = directory / f"{each.step}-{each.process}"
            stack.callback(path.unlink, missing_ok=True)
            path.write_bytes(each.memory)
        names = [[each.step, each.process, each.processes, each.parts] for each in mine]
        said = hosts.gather(names)
        return [_mapped(directory, *each) for group in said for each in group]
    except OSError as error:
        raise CheckpointError(
            f"{directory}, where the hosts that are left exchange their snapshots, cannot be used "
            f"({error.strerror}: {error.filename}). Put the run directory on storage that every "
            "host reaches and may write, and run the same command again"
        ) from error


def _mapped(directory: Path, step: int, process: int, processes: int, parts: list[Any]) -> Held:
    with (directory / f"{step}-{process}").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return Held(step=step, process=process, processes=processes, memory=memory, parts=parts)


def _remove(directory: Path) -> None:
    """The last process that leaves removes it."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def _pieces(held: Held, number: int) -> Iterator[Piece]:
    """The parts of an array that a snapshot has."""
    for place, (offset, shape, dtype, crc) in held.parts[number].items():
        values = np.ndarray(tuple(shape), np.dtype(dtype), held.memory, offset)
        begins = tuple(0 if a == "None" else int(a) for a, _ in _SLICE.findall(place))
        yield Piece(begin=begins, values=values, crc=crc)


def _parts(
    leaf: jax.ShapeDtypeStruct, pieces: Sequence[Iterator[Piece]]
) -> Mapping[str, np.ndarray]:
    """This process's parts of an array, by their place."""
    distinct: dict[tuple[int, ...], Piece] = {}
    for each in pieces:
        distinct |= {piece.begin: piece for piece in each}
    assert leaf.sharding is not None
    found: dict[str, np.ndarray] = {}
    checked: set[tuple[int, ...]] = set()
    for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
        if index is not None and str(index) not in found:
            found[str(index)] = _assembled(leaf, index, distinct, checked)
    return found


def _assembled(
    leaf: jax.ShapeDtypeStruct,
    index: tuple[slice, ...],
    pieces: Mapping[tuple[int, ...], Piece],
    checked: set[tuple[int, ...]],
) -> np.ndarray:
    """One part of an array, from those of another division that overlap it."""
    ends = [each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True)]
    part = np.empty([end - begin for begin, end in ends], leaf.dtype)
    missing = part.size
    for begins, piece in pieces.items():
        inner, outer = [], []
        for (begin, end), first, size in zip(ends, begins, piece.values.shape, strict=True):
            low, high = max(begin, first), min(end, first + size)
            inner.append(slice(low - first, high - first))
            outer.append(slice(low - begin, high - begin))
        if any(each.stop <= each.start for each in inner):
            continue
        if begins not in checked and crc32(piece.values.reshape(-1).view(np.uint8)) != piece.crc:
            raise CheckpointError(
                "a snapshot that hosts exchanged is damaged; run the command again"
            )
        checked.add(begins)
        part[tuple(outer)] = piece.values[tuple(inner)]
        missing -= part[tuple(outer)].size
    if missing:
        raise CheckpointError("the snapshots of the group before do not hold all of the state")
    return part
