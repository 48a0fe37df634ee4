"""A capture that fills XProf's pages, on a CPU too.

XProf reads operations from planes of devices, and a CPU has none: its thunks lie on the host's
threads. So the export adds a plane for each CPU device with the same events, named as XProf names a
GPU's because it supports no other device that runs streams, and marked as no GPU's by its vendor.
Captures of GPUs and TPUs have such planes and are copied as they are.

Facts of `xplane_schema.cc` and `xplane_to_op_stats.cc` of openxla/xprof that this rests on: a line
with the id 0xdeadbeef holds steps; `group_id` joins an event to its step and is read as a signed
integer only; lines called "Stream #n(Compute)" hold kernels; rates are statistics of the plane. The
viewers of memory and graphs read each program from a file of its own.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config import environment
from fornax.config.errors import FornaxError, ProfileError
from fornax.config.files import write_whole
from fornax.mesh.hardware import Chip
from fornax.mesh.hardware.cpu import cpu_chip, processor_name
from fornax.profile.adapters import adapt
from fornax.profile.facts import Operation, Row, Step
from fornax.profile.profile import Profile
from fornax.profile.read import captures, read
from fornax.profile.records import SPACES, read_records
from fornax.profile.xspace import read_space

_STEPS = 0xDEADBEEF
_FIRST_PLANE = 1000
_SIGNED = frozenset(["group_id", "correlation_id"])
_VENDOR = "CPU"
_KERNEL = "regs:0 static_shared:0 dynamic_shared:0 grid:1,1,1 block:1,1,1 occ_pct:0"
"""Of an operation on a CPU: without it the page of kernels is empty."""
_PS = 1000
"""Picoseconds of a nanosecond."""


def write_xprof(directory: Path | str, out: Path | str) -> Path:
    """Write the newest capture of a directory so that XProf shows all of it.

    Args:
      directory: of captures, or the folder of one.
      out: a directory for XProf's `--logdir`; gets `plugins/profile/<capture>/`.

    Returns:
      The capture's folder in it.

    Raises:
      ProfileError: there is no capture, it cannot be read, or `out` cannot be written.
    """
    profile = read(directory)
    folder = captures(directory)[-1]
    target = Path(out) / "plugins" / "profile" / folder.name
    if target.resolve() == folder.resolve():
        raise ProfileError(
            f"{out} is the capture's own directory; give another directory for the export"
        )
    records = {record.space: record for record in read_records(folder)}
    paths = sorted(folder.glob(SPACES))
    unnamed = iter(
        rank
        for rank in profile.info.ranks
        if rank not in {record.rank for record in records.values()}
    )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if profile.info.platform != "cpu":
                shutil.copyfile(path, target / path.name)
                continue
            record = records.get(path.name)
            rank = record.rank if record else next(unnamed)
            space = read_space(path, record.size if record else None)
            _add_devices(space, profile, rank, _chip(folder, profile))
            write_whole(target / path.name, space.SerializeToString())
        for program in profile.programs:
            name = f"{program.name}({program.module_id}).hlo_proto.pb"
            write_whole(target / name, program.proto)
    except OSError as error:
        raise ProfileError(
            f"{target} cannot be written ({error.strerror or error}); give another directory"
        ) from error
    return target


def _chip(folder: Path, profile: Profile) -> Chip | None:
    """The rates of this machine, if the capture is of it."""
    here = (processor_name(), environment.usable_cores())
    if not any((record.processor, record.cores) == here for record in read_records(folder)):
        return None
    try:
        return cpu_chip(profile.info.devices)
    except FornaxError:
        return None


def _add_devices(space: Any, profile: Profile, rank: int, chip: Chip | None) -> None:
    """Add a plane for each device of a rank to its XSpace."""
    rows: dict[str, list[Row]] = {}
    for row in profile.rows:
        if row.rank == rank and row.device and len(row.events):
            rows.setdefault(row.device, []).append(row)
    steps = [(at, step) for at, step in enumerate(profile.steps) if step.rank == rank]
    shift = _shift(space, profile, rank)
    for number, device in enumerate(sorted(rows)):
        plane = space.planes.add(
            id=_FIRST_PLANE + number, name=f"/device:GPU:{device.rpartition(':')[2]}"
        )
        writer = _Plane(plane, shift)
        writer.statistics(plane, _rates(chip))
        writer.steps(steps)
        for at, row in enumerate(rows[device]):
            writer.stream(at, row, profile, dict(steps))


def _shift(space: Any, profile: Profile, rank: int) -> int:
    """Nanoseconds from the profile's clock, which is the first rank's, to the rank's own."""
    own = [row for row in profile.rows if row.rank == rank]
    if rank == profile.info.ranks[0] or not own:
        return 0
    raw = adapt(space, rank)
    return int(raw.rows[0].begin[0]) - raw.begin - int(own[0].events.begin[0])


def _rates(chip: Chip | None) -> Iterator[tuple[str, Any]]:
    yield "device_vendor", _VENDOR
    yield "core_count", environment.usable_cores()
    yield "compute_cap_major", 1
    yield "compute_cap_minor", 0
    if chip is None:
        return
    peak, memory = chip.peak("float32") / chip.devices, chip.memory_bandwidth / chip.devices
    yield "clock_rate", 1_000_000  # kHz; only XProf's guess of a peak that the next line gives
    yield "peak_teraflops_per_second", peak / 1e12
    yield "peak_hbm_bw_gigabytes_per_second", memory / 1e9
    yield "memory_bandwidth", int(memory)
    yield "memory_size", int(chip.memory_bytes / chip.devices)


class _Plane:
    """Writes one plane: names and statistics are numbers that the plane's tables explain."""

    def __init__(self, plane: Any, shift: int) -> None:
        """`shift` nanoseconds are added to all times."""
        self._plane = plane
        self._shift = shift
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}

    def statistics(self, holder: Any, values: Iterator[tuple[str, Any]]) -> None:
        """Give a plane or an event its statistics."""
        for key, value in values:
            stat = holder.stats.add(metadata_id=self._key(key))
            if isinstance(value, str):
                stat.str_value = value
            elif isinstance(value, float):
                stat.double_value = value
            elif key in _SIGNED:
                stat.int64_value = value
            else:
                stat.uint64_value = value

    def steps(self, steps: list[tuple[int, Step]]) -> None:
        """The line of steps; a step's group is its position in the profile."""
        line = self._plane.lines.add(id=_STEPS, name="Steps")
        for at, step in steps:
            event = line.events.add(
                metadata_id=self._name(str(step.number)),
                offset_ps=(step.begin + self._shift) * _PS,
                duration_ps=(step.end - step.begin) * _PS,
            )
            self.statistics(
                event, iter([("group_id", at), ("step_name", f"{step.name} {step.number}")])
            )

    def stream(self, number: int, row: Row, profile: Profile, steps: dict[int, Step]) -> None:
        """A thread of a device as a stream."""
        line = self._plane.lines.add(id=number + 1, name=f"Stream #{number + 1}(Compute)")
        events = row.events
        for at in np.flatnonzero(events.operation >= 0).tolist():
            operation = profile.operations[events.operation[at]]
            event = line.events.add(
                metadata_id=self._name(operation.name),
                offset_ps=(int(events.begin[at]) + self._shift) * _PS,
                duration_ps=int(events.duration[at]) * _PS,
            )
            self.statistics(event, self._of(operation, at, int(events.step[at]), profile, steps))

    def _of(
        self, operation: Operation, at: int, step: int, profile: Profile, steps: dict[int, Step]
    ) -> Iterator[tuple[str, Any]]:
        yield "hlo_op", operation.name
        yield "correlation_id", at + 1
        yield "kernel_details", _KERNEL
        if operation.program >= 0:
            program = profile.programs[operation.program]
            yield "hlo_module", program.name
            yield "program_id", program.module_id
        if step in steps:
            yield "group_id", step

    def _key(self, name: str) -> int:
        if name not in self._keys:
            self._keys[name] = len(self._keys) + 1
            entry = self._plane.stat_metadata.add(key=self._keys[name])
            entry.value.id, entry.value.name = self._keys[name], name
        return self._keys[name]

    def _name(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = len(self._names) + 1
            entry = self._plane.event_metadata.add(key=self._names[name])
            entry.value.id, entry.value.name = self._names[name], name
        return self._names[name]
