"""What is known of a planned run: the chips, its programs, their memory, work and exchanges.

Plain data that producers fill and reports show. Figures are of one chip and one step unless the
name says otherwise; bytes are whole numbers, times are seconds. A `Plan` reads back from its JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Advice",
    "Buffer",
    "ClassOfWork",
    "CollectiveTime",
    "Compilation",
    "Exchange",
    "Finding",
    "Hardware",
    "Memory",
    "MemoryPart",
    "Money",
    "Option",
    "Plan",
    "Prediction",
    "ProgramReport",
    "Round",
    "Run",
    "Speed",
    "StepFacts",
    "Work",
]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One product, kernel or pass over memory of a device, before its time is known."""

    kind: str
    """The class of the roofline that it belongs to."""
    flops: float = 0.0
    bytes: float = 0.0
    """Read from and written to device memory."""
    count: float = 1.0
    """Times a step."""
    sides: tuple[int, int, int] | None = None
    """(rows, contracted, columns) of a product, or of its kernel's tiles, for how well it fills the
    matrix units."""
    computed: float = 1.0
    """FLOPs that the matrix units execute over `flops`: those of tiles that are filled in part."""
    dtype: str | None = None
    """What it is computed in; None for the step's."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective of a step, before its time is known."""

    name: str
    kind: str
    """A `CollectiveKind` of `fornax.hlo`."""
    axes: tuple[str, ...]
    """Mesh axes that its groups span."""
    bytes: int
    """The whole array of a group; of a transfer to the host, the bytes of a device."""
    count: int
    """Times a step."""
    blocking: bool = False
    """Whether the next computation needs its result, so that little can hide it."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """A training step as closed forms know it: what runs, not in which order."""

    memory: "Memory"
    work: tuple[Work, ...]
    """Of one device."""
    exchanges: tuple[Exchange, ...]
    dtype: str
    """That products are computed in."""
    mesh: Mapping[str, int]
    """Mesh axis to size."""
    repeated_flops: float
    """Of a chip: those that the remat policy executes a second time."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The time of a step."""

    step_seconds: float
    compute_seconds: float
    """All operations, without any exchange."""
    memory_seconds: float
    """Of those, in operations that wait for memory."""
    exposed_seconds: float
    """Communication that computation does not hide."""
    optimistic_seconds: float
    """With every exchange hidden as far as links allow."""
    pessimistic_seconds: float
    """With none hidden."""
    bound: str
    """What takes most of the time: `compute`, `memory`, `ici`, `dcn` or `host`."""
    work: "tuple[ClassOfWork, ...]"
    collectives: "tuple[CollectiveTime, ...]"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes of a chip's memory with one owner."""

    owner: str
    """`parameters`, `optimizer`, `gradients`, `activations`, `temporaries`, `batch`, `other`; of
    reinforcement learning also `sampler` and `reference`."""
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

    def owned(self, owner: str) -> int:
        """Bytes of one owner."""
        return sum(part.bytes for part in self.parts if part.owner == owner)

    @property
    def over(self) -> int:
        """By how much that is too much; 0 when it fits."""
        return max(0, self.total - self.usable)

    @property
    def fits(self) -> bool:
        """Whether it is no more than is usable."""
        return self.total <= self.usable


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One exchange between chips, all of its runs in a step together."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes that its groups span."""
    link: str
    """`ici` inside a slice (NVLink inside a node), `dcn` between them, `host` to the host; of a
    compiled program also `chip`, `nvlink` and `network`."""
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
    """Something in the program that its sharding rules did not ask for, and what would fix it."""

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
    collectives: tuple[CollectiveTime, ...] = ()
    findings: tuple[Finding, ...] = ()
    compilation: Compilation | None = None
    notes: tuple[str, ...] = ()
    """What is not known or only assumed about this program."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The chips."""

    topology: str
    chip: str
    platform: str
    chips: int
    devices: int
    hosts: int
    slices: int
    peak_flops: float
    """Of one chip, in the dtype products are computed in."""
    peak_dtype: str
    memory_bandwidth: float
    memory_bytes: int
    """As the chip is sold."""
    sources: dict[str, str] = field(default_factory=dict)
    """Figure to where it is published."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What would run."""

    parameters: int
    batch_size: int
    seq_len: int
    accumulate: int
    steps: int | None
    """None: as many as the data has, which a plan does not read."""
    remat: str
    params_dtype: str
    compute_dtype: str
    mesh: dict[str, int]
    """Axes larger than one."""
    model_flops: float
    """Of a whole step over all chips, by `fornax.models.flops_per_token`."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all chips."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast training is predicted to be."""

    step_seconds: float
    """Of a step of the run; of a round's, with its share of what comes before it."""
    mfu: float
    """Model FLOP/s over the chips' peak, of the program; recomputation does not count."""
    hfu: float
    """Executed FLOP/s over the chips' peak, of the program."""
    tokens_per_second_per_chip: float
    tokens_per_day: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of reinforcement learning, one part after the other on the same chips."""

    completions: int
    steps: int
    """Of the optimizer."""
    sample_seconds: float
    """To draw the completions."""
    score_seconds: float
    """Of the passes before the first step: log-probabilities, the reference's, values."""
    train_seconds: float
    """Of all steps."""

    @property
    def seconds(self) -> float:
        """The round, without rewards and the transfer of weights."""
        return self.sample_seconds + self.score_seconds + self.train_seconds


@dataclass(frozen=True, kw_only=True)
class Money:
    """What it costs at a price of the user's."""

    currency: str
    per_chip_hour: float
    per_day: float
    per_billion_tokens: float
    whole_run: float | None
    """All of the config's steps; None where they are not known."""
    days: float | None
    """Of the whole run."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that would make the plan fit, with its price."""

    change: str
    """In words."""
    flags: str
    """To give after the command, or empty when it is not a key of the config."""
    total_bytes: int
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Option:
    """One of the plans that a search found."""

    changes: str
    """YAML of the keys that differ, on one line."""
    reason: str
    total_bytes: int
    step_seconds: float
    tokens_per_second_per_chip: float
    compiled: bool
    """Whether its figures come from the compiled program."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole plan."""

    name: str
    """Of the configuration or model."""
    origin: Literal["compiled", "predicted"]
    """`compiled`: from the program as the compiler made it; `predicted`: from closed forms."""
    how: str
    """One sentence on where the figures come from."""
    hardware: Hardware
    programs: tuple[ProgramReport, ...]
    """The step that matters first."""
    run: Run | None = None
    """For training."""
    kernels: tuple[str, ...] = ()
    """Which implementation each kernel gets, and why no faster one: the lines that a run shows."""
    speed: Speed | None = None
    """For training."""
    round: Round | None = None
    """For reinforcement learning."""
    money: Money | None = None
    advice: tuple[Advice, ...] = ()
    """For a plan that does not fit: cheapest first."""
    options: tuple[Option, ...] = ()
    """What a search found: best first."""
    searched: str = ""
    """One sentence on how far the search went."""
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> ProgramReport:
        """The step that matters."""
        return self.programs[0]

    @property
    def fits(self) -> bool:
        """Whether every program fits."""
        return all(program.memory.fits for program in self.programs)
