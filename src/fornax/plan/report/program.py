"""What a plan says of one program: its memory, work, exchanges and what nobody asked for.

Figures are of one chip and one step unless the name says otherwise; bytes are whole numbers, times
are seconds.
"""

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Buffer",
    "ClassOfWork",
    "Collective",
    "Compilation",
    "Finding",
    "Memory",
    "MemoryPart",
    "ProgramReport",
]


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes of a chip's memory with one owner."""

    owner: str
    """`parameters`, `optimizer`, `gradients`, `activations`, `temporaries`, `batch`, `other`."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One array that is alive at the peak."""

    name: str
    owner: str
    shape: str
    bytes: int
    """With what its layout pads."""
    unpadded_bytes: int
    source: str = ""
    """The line of the program that makes it."""

    @property
    def padding(self) -> float:
        """Times larger than its elements, because of its layout."""
        return self.bytes / self.unpadded_bytes if self.unpadded_bytes else 1.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A chip's memory at the peak of a program."""

    parts: tuple[MemoryPart, ...]
    """By owner; they sum to what the program needs."""
    usable: int
    """What the compiler lets a program use."""
    host: int = 0
    """Bytes kept in the host's memory for this chip."""
    buffers: tuple[Buffer, ...] = ()
    """The largest buffers alive at the peak, largest first."""

    @property
    def total(self) -> int:
        """What the program needs."""
        return sum(part.bytes for part in self.parts)

    @property
    def over(self) -> int:
        """By how much that is too much; 0 when it fits."""
        return max(0, self.total - self.usable)

    @property
    def fits(self) -> bool:
        """Whether it is no more than is usable."""
        return self.total <= self.usable


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One exchange between chips, all of its runs in a step together."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes that its groups span."""
    link: str
    """`ici` inside a slice (NVLink inside a node), `dcn` between them, `host` to the host."""
    bytes: int
    """Of the whole gathered or reduced array of a group, once."""
    count: int
    """Times a step."""
    seconds: float
    exposed_seconds: float
    """What computation does not hide."""
    what: str = ""
    """The operation or array it serves."""
    source: str = ""

    @property
    def moved(self) -> int:
        """Bytes over all runs of a step."""
        return self.bytes * self.count


@dataclass(frozen=True, kw_only=True)
class ClassOfWork:
    """A class of operations: one point of the roofline."""

    name: str
    flops: float
    bytes: float
    """Read from and written to the chip's memory."""
    seconds: float
    bound: str
    """`compute` or `memory`."""

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in the program that its sharding rules did not ask for, and what would mend it."""

    kind: Literal["replicated", "collective"]
    what: str
    bytes: int
    seconds: float = 0.0
    source: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a program was compiled."""

    lower_seconds: float
    compile_seconds: float
    code_bytes: int
    hlo_bytes: int
    """Of the optimized program as text."""
    cached: bool = False
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One program: a training, evaluation or engine step."""

    name: str
    memory: Memory
    flops: float
    """Executed, recomputation and every run of a loop included."""
    bytes: float
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """Communication that computation does not hide."""
    optimistic_seconds: float
    """With every exchange hidden."""
    pessimistic_seconds: float
    """With none hidden."""
    bound: str
    """What the step waits for most: `compute`, `memory`, `ici`, `dcn` or `host`."""
    work: tuple[ClassOfWork, ...] = ()
    collectives: tuple[Collective, ...] = ()
    findings: tuple[Finding, ...] = ()
    compilation: Compilation | None = None
    notes: tuple[str, ...] = ()
    """What is not known or only assumed about this program."""
