"""Read a capture's folder into a `Profile`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fornax.config import environment
from fornax.config.errors import FornaxError, ProfileError
from fornax.hlo import Module
from fornax.mesh.hardware import Chip, chip_of
from fornax.mesh.hardware.cpu import cpu_chip, processor_name
from fornax.profile.adapters import adapt
from fornax.profile.causes import find_steps, step_of, step_thread
from fornax.profile.counters import read_counters
from fornax.profile.facts import (
    CaptureInfo,
    Events,
    Memory,
    Operation,
    Program,
    Row,
    Sample,
    Step,
)
from fornax.profile.host import read_host, read_input
from fornax.profile.memory import read_memory
from fornax.profile.operations import Lookup, module_text, read_program, unknown
from fornax.profile.profile import Profile
from fornax.profile.raw import Key, Raw, RawRow
from fornax.profile.records import SPACES, CaptureRecord, read_records
from fornax.profile.serving import read_serving
from fornax.profile.xspace import own_time, read_space

_FOLDERS = ("plugins", "profile")
_LEAST_STEPS = 2
"""Steps that ranks must share for their clocks to be joined by them."""


def captures(directory: Path | str) -> list[Path]:
    """The folders of captures in a directory, the oldest first.

    The directory is what a capture was given, the directory of a run, or one capture's own folder.
    """
    root = Path(directory)
    if any(root.glob(SPACES)):
        return [root]
    held = (root.joinpath(*_FOLDERS), root.joinpath("profile", *_FOLDERS))
    folders = (path.parent for each in held for path in each.glob(f"*/{SPACES}"))
    return sorted(set(folders), key=lambda folder: (folder.stat().st_mtime_ns, folder.name))


def read(directory: Path | str) -> Profile:
    """Read the newest capture of a directory.

    Args:
        directory: what a capture was given, the directory of a run, or the folder of one capture.

    Raises:
        ProfileError: there is no capture, or one of its files is empty, truncated or no XSpace.
    """
    found = captures(directory)
    if not found:
        raise ProfileError(
            f"{directory} holds no capture (no plugins/profile/*/*.xplane.pb); make one with "
            "`fornax profile train`, `fornax profile serve` or `fornax.profile.capture`"
        )
    return _Reading(found[-1]).profile()


class _Reading:
    """One capture on its way from files to a profile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.records = read_records(folder)
        self.raws = self._raws()
        self.origin = self.raws[0].begin
        self.devices = self._devices()
        self.chip = self._chip()
        self.programs: list[Program] = []
        self.modules: list[Module | None] = []
        self.operations: list[Operation] = []
        self._positions: dict[tuple[int, Key], int] = {}

    def profile(self) -> Profile:
        self._look_up()
        known = {key: self.operations[at] for key, at in self._positions.items()}
        steps = [find_steps(raw, known) for raw in self.raws]
        offsets = self._offsets(steps)
        threads = [step_thread(raw) for raw in self.raws]
        origins = [self.origin + offset for offset in offsets]
        shifted = [
            [self._moved(step, origin) for step in own]
            for own, origin in zip(steps, origins, strict=True)
        ]
        names: dict[str, int] = {}
        rows, first = [], 0
        for raw, own, origin in zip(self.raws, shifted, origins, strict=True):
            for row in raw.rows:
                rows.append(self._row(row, own, first, origin, names))
            first += len(own)
        marked = [{mark.name for mark in raw.marks} for raw in self.raws]
        host = read_host(self.raws, marked)
        collections = tuple(
            dataclasses.replace(each, begin=each.begin - self.origin) for each in host.collections
        )
        return Profile(
            info=self._info(),
            names=list(names),
            rows=tuple(rows),
            steps=tuple(step for own in shifted for step in own),
            operations=tuple(self.operations),
            programs=tuple(self.programs),
            memory=tuple(self._memory()),
            samples=self._samples(),
            host=dataclasses.replace(host, collections=collections),
            input=read_input(self.raws, threads, steps),
            counters=read_counters(self.raws, origins, self.records),
            serving=read_serving(self.raws, origins, shifted),
        )

    def _raws(self) -> list[Raw]:
        spaces = {path.name: path for path in sorted(self.folder.glob(SPACES))}
        raws = []
        for record in self.records:
            path = spaces.pop(record.space, None)
            if path is None:
                raise ProfileError(
                    f"{self.folder / record.space} is missing, which capture-{record.rank}.json "
                    "names; copy the whole folder, or delete that record to read the other ranks"
                )
            raws.append(adapt(read_space(path, record.size), record.rank))
        first = max((raw.rank for raw in raws), default=-1) + 1
        raws += [adapt(read_space(path), first + n) for n, path in enumerate(spaces.values())]
        self.notes += [
            f"the file of rank {raw.rank} does not say when its session ended: it may be cut off"
            for raw in raws
            if not raw.whole
        ]
        return raws

    def _chip(self) -> Chip | None:
        """What ran the capture, where its rates are known."""
        kind = self._device_kind()
        platform = self._platform()
        if platform != "cpu":
            chip = chip_of(kind)
            if chip is None:
                self.notes.append(
                    f"device kind {kind!r} is not in the table of chips: no roofline bounds"
                )
            return chip
        record = next(iter(self.records), None)
        here = (processor_name(), environment.usable_cores())
        if record is None or (record.processor, record.cores) != here:
            made = f"on {record.processor}, {record.cores} cores" if record else "by jax.profiler"
            self.notes.append(
                f"the capture was made {made}, and only this machine's rates can be measured: no "
                "roofline bounds"
            )
            return None
        try:
            return cpu_chip(self.devices)
        except FornaxError as error:
            self.notes.append(f"{error}: no roofline bounds")
            return None

    def _devices(self) -> int:
        """Of all ranks, those that did nothing included where records count them."""
        seen = {(row.rank, row.device) for raw in self.raws for row in raw.rows if row.device}
        said = max((record.devices * record.ranks for record in self.records), default=0)
        return max(said, len(seen), 1)

    def _platform(self) -> Literal["cpu", "gpu", "tpu"]:
        devices = {row.device.partition(":")[0] for raw in self.raws for row in raw.rows}
        return "tpu" if "tpu" in devices else "gpu" if "gpu" in devices else "cpu"

    def _device_kind(self) -> str:
        said = [record.device_kind for record in self.records]
        said += [kind for raw in self.raws for kind in raw.kinds]
        return said[0] if said else self._platform()

    def _look_up(self) -> None:
        """Find the programs of all ranks, and the operation of each event's key."""
        wanted: dict[tuple[int, Key], None] = {}
        for raw in self.raws:
            for row in raw.rows:
                wanted.update({(raw.rank, key): None for key in row.keys if key is not None})
        runs: dict[tuple[int, int, str], set[str]] = {}
        for rank, (number, name, operation) in wanted:
            runs.setdefault((rank, number, name), set()).add(operation)
        choose = _Chooser(self.raws, self.devices)
        at_of: dict[tuple[int, int, str], int] = {}
        placed: dict[int, int] = {}
        for run, operations in runs.items():
            found = choose.program_of(*run, operations)
            if found is None:
                at_of[run] = -1
                continue
            if id(found) not in placed:
                placed[id(found)] = len(self.programs)
                self.programs.append(found[0])
                self.modules.append(found[1])
                self.notes += [found[2]] if found[2] else []
            at_of[run] = placed[id(found)]
        lookups = [
            Lookup(program, module, at, self.chip)
            for at, (program, module) in enumerate(zip(self.programs, self.modules, strict=True))
        ]
        made: dict[tuple[int, str], int] = {}
        for rank, key in wanted:
            program = at_of[rank, key[0], key[1]]
            place = (program, key[2])
            if place not in made:
                made[place] = len(self.operations)
                operation = (
                    lookups[program].operation(key[2]) if program >= 0 else unknown(key[2], -1)
                )
                self.operations.append(operation)
            self._positions[rank, key] = made[place]
        if any(operation.program < 0 for operation in self.operations):
            self.notes.append(
                "the capture does not hold all programs that ran: some operations have no work, "
                "module or line"
            )

    def _row(
        self, row: RawRow, steps: Sequence[Step], first: int, origin: int, names: dict[str, int]
    ) -> Row:
        begin = row.begin - origin
        at = step_of(steps, begin)
        operation = [self._positions[row.rank, key] if key else -1 for key in row.keys]
        return Row(
            rank=row.rank,
            device=row.device,
            name=row.name,
            kind=row.kind,
            events=Events(
                begin=begin,
                duration=row.duration,
                own=own_time(row.begin, row.duration),
                name=np.array([names.setdefault(n, len(names)) for n in row.names], np.int32),
                operation=np.array(operation, np.int32),
                step=np.where(at >= 0, at + first, -1).astype(np.int32),
                helped=row.helped,
            ),
        )

    def _offsets(self, steps: Sequence[Sequence[Step]]) -> list[int]:
        """How far each rank's clock is ahead of the first's, by the ends of steps that both made.

        Only where steps exchange, which makes their ends coincide.
        """
        offsets = [0] * len(steps)
        exchanging = all(any(step.causes.nanoseconds["exchange"] for step in own) for own in steps)
        if len(steps) < 2 or not exchanging:
            return offsets
        ends = {step.number: step.end for step in steps[0]}
        for at, own in enumerate(steps[1:], start=1):
            apart = [step.end - ends[step.number] for step in own if step.number in ends]
            if len(apart) >= _LEAST_STEPS:
                offsets[at] = int(np.median(apart))
        if any(offsets):
            self.notes.append(
                "clocks of ranks joined at the ends of steps: off by at most "
                f"{max(map(abs, offsets)) / 1e3:,.0f} us"
            )
        return offsets

    def _moved(self, step: Step, origin: int) -> Step:
        return dataclasses.replace(step, begin=step.begin - origin, end=step.end - origin)

    def _memory(self) -> list[Memory]:
        pairs = zip(self.programs, self.modules, strict=True)
        found = (read_memory(at, program, module) for at, (program, module) in enumerate(pairs))
        return [memory for memory in found if memory is not None]

    def _samples(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(
                time=time - self.origin,
                rank=record.rank,
                device=device,
                bytes_in_use=used,
                peak_bytes=peak,
                limit_bytes=limit,
            )
            for record in self.records
            for time, device, used, peak, limit in record.samples
        )

    def _info(self) -> CaptureInfo:
        records: Sequence[CaptureRecord] = self.records
        files = [path for path in self.folder.iterdir() if path.is_file()]
        versions: dict[str, str] = {}
        for raw in self.raws:
            versions |= raw.versions
        for record in records:
            versions |= record.versions
        spaces = sorted(path.name for path in self.folder.glob(SPACES))
        ended = [record.ended for record in records if record.ended != "stopped"]
        missing = (records[0].ranks if records else 0) - len(records)
        if missing > 0:
            self.notes.append(f"{missing} of {records[0].ranks} ranks are not in this folder")
        return CaptureInfo(
            folder=self.folder.name,
            begin=self.origin / 1e9,
            seconds=max(raw.end - raw.begin for raw in self.raws) / 1e9,
            platform=self._platform(),
            device_kind=self._device_kind(),
            devices=self.devices,
            hosts=tuple(record.host for record in records)
            or tuple(name.removesuffix(SPACES[1:]) for name in spaces),
            ranks=tuple(raw.rank for raw in self.raws),
            versions=versions,
            truncated=bool(ended),
            bytes=sum(path.stat().st_size for path in files),
            notes=tuple(self.notes),
        )


_Parsed = tuple[Program, Module | None, str]


class _Chooser:
    """Tells which of the programs in a capture ran some operations.

    A program from jax's compilation cache runs under the number that it was first compiled with,
    and lies in the capture under one of this process: numbers alone can name another program.
    """

    def __init__(self, raws: Sequence[Raw], devices: int) -> None:
        self._programs = {raw.rank: raw.programs for raw in raws}
        self._devices = devices
        self._parsed: dict[tuple[str, str], _Parsed] = {}
        """By name and text: of several ranks' copies the first."""
        self._texts: dict[tuple[int, int], str] = {}

    def program_of(self, rank: int, number: int, name: str, operations: set[str]) -> _Parsed | None:
        """The program of the number and name, unless another of the name has more operations."""
        programs = self._programs[rank]
        named = number in programs and name in ("", programs[number][0])
        own = self._parse(rank, number) if named else None
        most = 0 if own is None else _known(own, operations)
        if most == len(operations):
            return own
        for other, (called, _) in programs.items():
            if other != number and called == name:
                parsed = self._parse(rank, other)
                if (known := _known(parsed, operations)) > most:
                    own, most = parsed, known
        return own

    def _parse(self, rank: int, number: int) -> _Parsed:
        name, proto = self._programs[rank][number]
        if (rank, number) not in self._texts:
            self._texts[rank, number] = module_text(proto)
        text = self._texts[rank, number]
        if (name, text) not in self._parsed:
            parsed = read_program(name, number, rank, proto, text, self._devices)
            self._parsed[name, text] = parsed
        return self._parsed[name, text]


def _known(parsed: _Parsed, operations: set[str]) -> int:
    """How many operations are a program's."""
    module = parsed[1]
    if module is None:
        return 0
    every = (each.instructions for each in module.computations.values())
    return sum(instruction.name in operations for part in every for instruction in part)
