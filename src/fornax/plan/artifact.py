"""What one compilation gave: the program's text, its memory, and what its arguments are."""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fornax.plan.files import write_whole

__all__ = [
    "Allocation",
    "ArrayFact",
    "Artifact",
    "DeviceFact",
    "MemoryFacts",
    "Owner",
]

Owner = Literal["parameters", "optimizer", "batch", "cache", "other"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ArrayFact:
    """One argument of the program."""

    name: str
    """Its path, such as `params/layers/attention/q/kernel`."""
    owner: Owner
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]
    """The mesh axes that divide each dimension; those of size one are left out."""
    bytes_global: int
    """Bytes of the whole array, unpadded."""
    bytes_device: int
    """Bytes of one device's share, unpadded."""

    @property
    def replicated(self) -> bool:
        """Whether every device holds all of it."""
        return not any(self.axes)


@dataclass(frozen=True, kw_only=True)
class DeviceFact:
    """Where a device of the mesh sits; in the order of `mesh.devices.flat`, which the ids in the
    program's replica groups count."""

    coords: tuple[int, ...]
    """Of the chip in its slice's torus; of a CPU or GPU its number."""
    core: int
    """Which of the chip's devices."""
    slice: int
    process: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Bytes of one device, as the compiler says; 0 where it says nothing."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that lie where an argument was."""
    temporaries: int
    """The arena reserved for everything in between, its gaps included: of a TPU as its compiler's
    buffer assignment has it, else as `memory_analysis` does."""
    code: int
    peak: int
    """As `memory_analysis` has it; libtpu adds the largest heap of any memory, be it the host's."""
    host: int = 0
    """Bytes in the host's memory: arguments, outputs and temporaries that are offloaded."""

    @property
    def total(self) -> int:
        """What a device must have free for the program to run."""
        return self.code + self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One of the largest allocations that the compiler names when a program does not fit."""

    bytes: int
    unpadded_bytes: int
    shape: str
    op_name: str
    source: str
    """`file:line`, or nothing."""
    kind: str
    """As the compiler says, such as `HLO temp`."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What the compiler made of one program for one topology."""

    program: str
    """`train_step`, `eval_step`, `engine_step`, …"""
    topology: str
    mesh: Mapping[str, int]
    """Mesh axis to its size, in mesh order."""
    devices: tuple[DeviceFact, ...]
    arguments: tuple[ArrayFact, ...]
    memory: MemoryFacts
    hlo: str
    """The optimized module's text; the bodies of kernels are cut out."""
    cost: Mapping[str, float]
    """`cost_analysis()` as it is: a loop's body is counted once."""
    versions: Mapping[str, str]
    lower_seconds: float
    compile_seconds: float
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the builder of the program wants to say, JSON-able."""

    def owned(self) -> dict[str, int]:
        """Bytes of one device's arguments by owner."""
        found: dict[str, int] = {}
        for array in self.arguments:
            found[array.owner] = found.get(array.owner, 0) + array.bytes_device
        return found

    def save(self, folder: Path) -> None:
        """Write `artifact.json` and `hlo.txt.gz` into `folder`."""
        told = dataclasses.asdict(dataclasses.replace(self, hlo=""))
        told["format"] = _FORMAT
        told["hlo_size"] = len(self.hlo)
        write_whole(folder / "hlo.txt.gz", gzip.compress(self.hlo.encode(), 6, mtime=0))
        write_whole(folder / "artifact.json", json.dumps(told).encode())

    @classmethod
    def load(cls, folder: Path) -> "Artifact":
        """Read what `save` wrote.

        Raises:
          OSError: when a file is missing or cannot be read.
          ValueError: when one is damaged or of another format.
        """
        told = json.loads((folder / "artifact.json").read_text(encoding="utf-8"))
        try:
            if told.pop("format") != _FORMAT:
                raise ValueError(f"{folder} holds an artifact of another format")
            told["devices"] = tuple(_device(device) for device in told["devices"])
            told["arguments"] = tuple(_array(array) for array in told["arguments"])
            told["memory"] = MemoryFacts(**told["memory"])
            told["notes"] = tuple(told["notes"])
            told["hlo"] = _unzip(folder / "hlo.txt.gz", told.pop("hlo_size"))
            return cls(**told)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder} holds no artifact: {error}") from error


def _unzip(path: Path, size: int) -> str:
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(text) != size:
        raise ValueError(f"{path} is damaged: {len(text)} of {size} characters")
    return text


def _device(told: dict[str, Any]) -> DeviceFact:
    told["coords"] = tuple(told["coords"])
    return DeviceFact(**told)


def _array(told: dict[str, Any]) -> ArrayFact:
    told["shape"] = tuple(told["shape"])
    told["axes"] = tuple(tuple(entry) for entry in told["axes"])
    return ArrayFact(**told)
