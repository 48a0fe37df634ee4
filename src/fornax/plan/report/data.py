"""What a plan says, as plain data: every figure that the table, the JSON and the page show.

`Plan` reads back from its JSON with `fornax.config.from_mapping`.
"""

from dataclasses import dataclass, field
from typing import Literal

from fornax.plan.report.program import ProgramReport

__all__ = ["Advice", "Hardware", "Money", "Option", "Plan", "Run", "Speed", "Table"]


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
    steps: int
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
    mfu: float
    """Model FLOP/s over the chips' peak; recomputation does not count."""
    hfu: float
    """Executed FLOP/s over the chips' peak."""
    tokens_per_second_per_chip: float
    tokens_per_day: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Money:
    """What it costs at a price of the user's."""

    currency: str
    per_chip_hour: float
    per_day: float
    per_billion_tokens: float
    whole_run: float
    """All of the config's steps."""
    days: float
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
class Table:
    """More rows that a kind of plan has to show."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lead: str = ""


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
    money: Money | None = None
    advice: tuple[Advice, ...] = ()
    """For a plan that does not fit: cheapest first."""
    options: tuple[Option, ...] = ()
    """What a search found: best first."""
    searched: str = ""
    """One sentence on how far the search went."""
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> ProgramReport:
        """The step that matters."""
        return self.programs[0]

    @property
    def fits(self) -> bool:
        """Whether every program fits."""
        return all(program.memory.fits for program in self.programs)
