"""`program.json` of a run: work, memory and roofline of its programs as they were compiled.

    {"device": "TPU v5p", "devices": 8, "peak_flops": 4.6e14, "bandwidth": 2.8e12,
     "programs": [{"name": "step", "flops", "bytes", "peak_bytes", "usable_bytes",
       "owners": {"parameters": bytes, ...}, "buffers": [{"name", "kind", "shape", "bytes",
       "source"}], "roofline": {"classes": [{"name", "flops", "bytes", "seconds", "bound"}],
       "seconds", "bound"}, "notes": []}]}

Figures are of one device and one run of a program. What depends on the device's rates is null where
no table knows it. A CPU's are those that `fornax plan` or `fornax profile show` measured and kept:
training does not wait for a measurement, and where there is none a note says so.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fornax.config.files import write_whole
from fornax.hlo import (
    HloParseError,
    Operation,
    Peak,
    Rates,
    analyse,
    calibration_of,
    operation_seconds,
    parse,
)
from fornax.mesh.hardware import Chip, chip_of
from fornax.mesh.hardware.cpu import kept_cpu_chip

__all__ = ["ProgramFile"]

_log = logging.getLogger(__name__)
_LARGEST = 12
_EVALUATED = ("parameters", "frozen")
_LONGEST = 4 << 20
"""Characters of a program beyond which it is not read: that would take more than some seconds."""

Json = dict[str, Any]


class ProgramFile:
    """Writes what each program of a run does, when it was compiled."""

    def __init__(
        self, path: Path, arguments: Mapping[str, object], axes: Mapping[str, int]
    ) -> None:
        """Write to `path`.

        Args:
          arguments: the trees of abstract arrays that a step is given, by owner; `parameters` and
            `frozen` among them.
          axes: the mesh's axes and sizes, in order.
        """
        self._path, self._axes = path, axes
        self._owners = {owner: device_bytes(tree) for owner, tree in arguments.items()}
        self._programs: dict[str, Json] = {}

    def add(self, name: str, compiled: jax.stages.Compiled, batch: object) -> None:
        """Take a program up; of one that cannot be read, or written, nothing is recorded.

        Args:
          name: `step` or `evaluate`; a later one of the same name takes the place of an earlier.
          compiled: the executable.
          batch: its abstract batch.
        """
        chip = _chip()
        # Of what only a step reads, an evaluation is given nothing.
        read = self._owners if name == "step" else {n: self._owners[n] for n in _EVALUATED}
        owners = {**read, "batch": device_bytes(batch)}
        try:
            text = compiled.as_text()
            if text is None or len(text) > _LONGEST:
                return
            found = describe(name, text, self._axes, owners, chip)
            if chip is None:
                found["notes"].append(_why_no_roofline())
            self._programs[name] = found
            written: Json = {
                "device": jax.devices()[0].device_kind,
                "devices": jax.device_count(),
                "peak_flops": None if chip is None else _peak(chip) / chip.devices,
                "bandwidth": None if chip is None else chip.memory_bandwidth / chip.devices,
                "programs": list(self._programs.values()),
            }
            write_whole(self._path, json.dumps(written))
        except (HloParseError, ValueError, KeyError, OSError, jax.errors.JaxRuntimeError) as error:
            _log.info("no facts of the program %s: %s", name, error)


def _chip() -> Chip | None:
    """What runs the program; of a CPU the part of one of its devices."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return kept_cpu_chip(jax.device_count())
    return chip_of(device.device_kind)


def _why_no_roofline() -> str:
    device = jax.devices()[0]
    if device.platform == "cpu":
        return (
            "no roofline: this CPU's rates are not measured yet; fornax plan and fornax profile "
            "show measure them once, and the next run has it"
        )
    return f"no roofline: device kind {device.device_kind!r} is not in the table of chips"


def _peak(chip: Chip) -> float:
    """FLOP/s of products: of a CPU in whichever dtype is the fastest."""
    return max(chip.peak_flops.values()) if chip.platform == "cpu" else chip.peak()


def describe(
    name: str, text: str, axes: Mapping[str, int], owners: Mapping[str, int], chip: Chip | None
) -> Json:
    """What a program does, of one device.

    Args:
      name: of the program.
      text: its optimized HLO.
      axes: the mesh's axes and sizes, in order.
      owners: bytes of its arguments by owner.
      chip: the device's; None where no table knows it.

    Raises:
      HloParseError: for text that is not an HLO module.
    """
    facts = analyse(parse(text), axes)
    peak = facts.peak
    given = sum(owners.values())
    sizes = {**owners, "temporaries": peak.temporaries}
    sizes["other"] = owners.get("other", 0) + max(0, peak.bytes - given - peak.temporaries)
    return {
        "name": name,
        "flops": facts.flops,
        "bytes": facts.bytes,
        "peak_bytes": peak.bytes,
        "usable_bytes": None if chip is None else int(chip.usable_bytes / chip.devices),
        "owners": {owner: size for owner, size in sizes.items() if size},
        "buffers": _largest(peak),
        "roofline": None if chip is None else _roofline(facts.operations, chip),
        "notes": list(facts.notes),
    }


def device_bytes(tree: object) -> int:
    """Bytes that one device holds of a tree of abstract arrays with shardings."""
    leaves = jax.tree.leaves(tree)
    shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves]
    return sum(math.prod(shape) * size for shape, size in shapes)


def _largest(peak: Peak) -> list[Json]:
    return [
        {
            "name": buffer.op_name or buffer.name,
            "kind": buffer.kind,
            "shape": buffer.shape,
            "bytes": buffer.bytes,
            "source": buffer.source or buffer.fornax_source,
        }
        for buffer in peak.buffers[:_LARGEST]
    ]


def _roofline(operations: Sequence[Operation], chip: Chip) -> Json:
    """Least times by class of operation: `fornax.hlo.operation_seconds` of each, added up."""
    rates = Rates(chip=chip, calibration=calibration_of(chip))
    classes: dict[str, Json] = {}
    waits = {"compute": 0.0, "memory": 0.0}
    for each in operations:
        timed = operation_seconds(each, rates)
        seconds = timed.seconds * each.count
        waits[timed.bound] += seconds
        row = classes.setdefault(
            each.category,
            {"name": each.category, "flops": 0.0, "bytes": 0.0, "seconds": 0.0, "compute": 0.0},
        )
        row["flops"] += each.flops * each.count
        row["bytes"] += each.bytes * each.count
        row["seconds"] += seconds
        row["compute"] += seconds if timed.bound == "compute" else 0.0
    rows = sorted(classes.values(), key=lambda row: -row["seconds"])
    for row in rows:
        row["bound"] = "compute" if 2 * row.pop("compute") > row["seconds"] else "memory"
    return {
        "classes": rows,
        "seconds": sum(waits.values()),
        "bound": max(waits, key=lambda bound: waits[bound]),
    }
