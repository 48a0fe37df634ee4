"""What can go wrong in the child that compiles, each as one paragraph."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fornax.config import errors
from fornax.config.errors import FornaxError, PlanError
from fornax.plan.artifact import Allocation, Artifact
from fornax.plan.format import format_gib


class CompileError(PlanError):
    """The compiler refused the program, died, or took too long."""


class MissingCompilerError(PlanError):
    """libtpu, the TPU compiler, is not installed."""


class OutOfMemoryError(PlanError):
    """The program does not fit into a device: a result, with figures for advice."""

    def __init__(
        self,
        program: str,
        topology: str,
        *,
        used: int,
        limit: int,
        allocations: tuple[Allocation, ...] = (),
        artifact: Artifact | None = None,
    ) -> None:
        """Say by how much it does not fit.

        Args:
          program: which one.
          topology: for which chips.
          used: bytes that it needs of a device.
          limit: bytes that a device has.
          allocations: the largest, where the compiler lists them.
          artifact: the program all the same, as far as the compiler came.
        """
        super().__init__(
            f"{program} does not fit on {topology}: it needs {format_gib(used)} of a device's "
            f"{format_gib(limit)}, {format_gib(used - limit)} too much"
        )
        self.program = program
        self.topology = topology
        self.used = used
        self.limit = limit
        self.allocations = allocations
        self.artifact = artifact


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50, "E": 2**60}
_SIZE = r"([\d.]+)([KMGTPE]?)B?"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_NEEDS = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_EARLY = re.compile(rf"Requires {_SIZE}, has {_SIZE} available")
_ENTRY = re.compile(r"^\s*\d+\. Size: ", re.MULTILINE)


def no_memory(text: str, program: str, topology: str) -> OutOfMemoryError | None:
    """The compiler's words as an error with figures, or None when they are about something else."""
    found = _USED.search(text) or _NEEDS.search(text) or _EARLY.search(text)
    if found is None:
        return None
    used, limit = _bytes(found[1], found[2]), _bytes(found[3], found[4])
    return OutOfMemoryError(
        program,
        topology,
        used=used,
        limit=limit,
        allocations=_allocations(text),
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _allocations(text: str) -> tuple[Allocation, ...]:
    found = []
    for entry in _ENTRY.split(text)[1:]:
        entry = entry.split("=====")[0]
        size = re.match(_SIZE, entry)
        if size is None:
            continue
        values = _fields(entry)
        unpadded = re.match(_SIZE, values.get("Unpadded size", ""))
        operator = values.get("Operator", "")
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', operator)
        found.append(
            Allocation(
                bytes=_bytes(size[1], size[2]),
                unpadded_bytes=_bytes(*(unpadded or size).groups()),
                shape=values.get("Shape", ""),
                op_name=_quoted(operator, "op_name"),
                source=f"{source[1]}:{source[2]}" if source else "",
                kind=values.get("Allocation type", ""),
            )
        )
    return tuple(sorted(found, key=lambda a: -a.bytes))


def _fields(entry: str) -> dict[str, str]:
    lines = (line.strip().partition(": ") for line in entry.splitlines())
    return {name: value for name, colon, value in lines if colon}


def _quoted(text: str, name: str) -> str:
    found = re.search(rf'{name}="((?:[^"\\]|\\.)*)"', text)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


def to_mapping(error: FornaxError) -> dict[str, object]:
    """An error as plain data, to cross from the child or to be kept."""
    if not isinstance(error, OutOfMemoryError):
        return {"kind": type(error).__name__, "message": str(error)}
    return {
        "kind": "OutOfMemoryError",
        "program": error.program,
        "topology": error.topology,
        "used": error.used,
        "limit": error.limit,
        "allocations": [dataclasses.asdict(a) for a in error.allocations],
    }


def from_mapping(values: Mapping[str, Any]) -> FornaxError:
    """What `to_mapping` wrote, as an error again.

    Raises:
      KeyError, TypeError: when it is something else.
    """
    if values["kind"] == "OutOfMemoryError":
        return OutOfMemoryError(
            values["program"],
            values["topology"],
            used=int(values["used"]),
            limit=int(values["limit"]),
            allocations=tuple(Allocation(**a) for a in values["allocations"]),
        )
    kinds = {"CompileError": CompileError, "MissingCompilerError": MissingCompilerError}
    kind = kinds.get(values["kind"]) or getattr(errors, values["kind"], CompileError)
    return kind(values["message"])
