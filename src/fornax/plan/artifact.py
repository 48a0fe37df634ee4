"""What one compilation gave: the program's text, its memory, and what its arguments are."""

import dataclasses
import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jax.sharding import NamedSharding

from fornax.config import ConfigError, from_mapping
from fornax.config.files import write_whole

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
    bytes_device: int
    """Bytes of one device's share, unpadded."""


@dataclass(frozen=True, kw_only=True)
class DeviceFact:
    """Where a device of the mesh sits; in the order of `mesh.devices.flat`, which the ids in the
    program's replica groups count."""

    coords: tuple[int, ...]
    """Of the chip in its slice's torus; of a CPU or GPU its number."""
    core: int
    """Which of the chip's devices."""
    slice: int


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
    mesh: dict[str, int]
    """Mesh axis to its size, in mesh order."""
    devices: tuple[DeviceFact, ...]
    arguments: tuple[ArrayFact, ...]
    memory: MemoryFacts
    hlo: str
    """The optimized module's text; the bodies of kernels are cut out."""
    versions: dict[str, str]
    lower_seconds: float
    compile_seconds: float
    notes: tuple[str, ...] = ()
    cached: bool = field(default=False, compare=False)
    """Whether an earlier compilation was found."""

    def owned(self) -> dict[str, int]:
        """Bytes of one device's arguments by owner."""
        found: dict[str, int] = {}
        for array in self.arguments:
            found[array.owner] = found.get(array.owner, 0) + array.bytes_device
        return found

    def save(self, folder: Path) -> None:
        """Write `artifact.json` and `hlo.txt.gz` into `folder`."""
        values = dataclasses.asdict(dataclasses.replace(self, hlo=""))
        values["format"] = _FORMAT
        values["hlo_size"] = len(self.hlo)
        write_whole(folder / "hlo.txt.gz", gzip.compress(self.hlo.encode(), 6, mtime=0))
        write_whole(folder / "artifact.json", json.dumps(values).encode())

    @classmethod
    def load(cls, folder: Path) -> "Artifact":
        """Read what `save` wrote.

        Raises:
          OSError: when a file is missing or cannot be read.
          ValueError: when one is damaged or of another format.
        """
        values = json.loads((folder / "artifact.json").read_text(encoding="utf-8"))
        try:
            if values.pop("format") != _FORMAT:
                raise ValueError(f"{folder} holds an artifact of another format")
            text = _unzip(folder / "hlo.txt.gz", values.pop("hlo_size"))
            return from_mapping(cls, {**values, "hlo": text})
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ValueError(f"{folder} holds no artifact: {error}") from error


def _unzip(path: Path, size: int) -> str:
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(text) != size:
        raise ValueError(f"{path} is damaged: {len(text)} of {size} characters")
    return text


def dividing_axes(sharding: NamedSharding, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes larger than one that divide each of an array's dimensions."""
    entries = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    named = ((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    return tuple(tuple(name for name in names if sharding.mesh.shape[name] > 1) for names in named)
