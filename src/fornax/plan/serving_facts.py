"""What a serving plan says, as plain data: every figure of the table, the JSON and the page.

Bytes are those of one chip and whole numbers; times are seconds.
"""

from dataclasses import dataclass
from typing import Literal

from fornax.config.price import Price

Origin = Literal["compiled", "predicted"]
Bound = Literal["weights", "cache", "compute", "exchange", "sampling"]
"""What a step waits for most: reading weights, reading the cache, arithmetic, the links between
chips, or the output projection and the choice of tokens."""


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """The layers that share an attention window."""

    window: int | None
    """None: every token is kept."""
    layers: int
    bytes_per_token: int
    """While a token is kept."""
    pages_per_sequence: int
    """Of a sequence of full length, at most."""
    pages: int
    """That the engine would make, by its own rule."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """A chip's memory."""

    usable: int
    weights: int
    cache: int
    """Of the pages that the engine would make."""
    sampler: int
    """Counts of tokens, masks and parameters of every row, and the last hidden states."""
    states: int
    """Of linear layers, for every sequence that can run and for prefix reuse; 0 without such
    layers."""
    temporaries: int
    """Of the program that needs most."""
    code: int
    """Of all programs, as far as they were compiled."""
    bytes_per_token: int
    """Of a cached token inside all windows."""
    bytes_per_sequence: int
    """Of a sequence of full length."""
    groups: tuple[CacheGroup, ...]
    cache_tokens: int
    """Tokens of the full-attention cache that the engine would make."""
    sequences: float
    """Sequences of full length that it holds."""
    most_cache: int
    """The largest cache that would leave room for everything else."""
    most_tokens: int
    most_sequences: float

    @property
    def total(self) -> int:
        """What the engine would take."""
        kept = self.weights + self.cache + self.sampler + self.states
        return kept + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether that is no more than is usable."""
        return self.total <= self.usable


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One compiled program."""

    program: str
    """"step" or "sample"."""
    size: int
    """Tokens, or samples."""
    seconds: float
    """Of a step without attention, predicted from the program."""
    predicted_seconds: float
    """The same by closed forms."""
    temporaries: int
    code: int
    arguments: int
    lower_seconds: float
    compile_seconds: float
    exchanges: tuple[str, ...]
    """Collectives, each as kind, count and bytes."""


@dataclass(frozen=True, kw_only=True)
class DecodeLatency:
    """Bounds on decoding: every sequence of the batch gets one token per step."""

    batch: int
    context: int
    """Tokens of each sequence."""
    seconds: float
    """Between two tokens of a sequence, at the rates that programs reach."""
    least_seconds: float
    """The same at published rates: a bound."""
    weights_seconds: float
    cache_seconds: float
    compute_seconds: float
    exchange_seconds: float
    sampling_seconds: float
    bound: Bound
    tokens_per_second_per_chip: float
    origin: Origin
    per_million_tokens: float | None = None
    """What a million of these tokens cost, where a price was given."""


@dataclass(frozen=True, kw_only=True)
class PromptLatency:
    """Bounds on the time to a first token of a prompt that comes to an idle engine."""

    tokens: int
    steps: int
    """Chunks of the prompt."""
    seconds: float
    least_seconds: float
    bound: Bound
    tokens_per_second_per_chip: float
    origin: Origin
    per_million_tokens: float | None = None
    """What a million of these tokens cost, where a price was given."""


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch whose tokens come quickly enough."""

    context: int
    batch: int
    """0 when not even one sequence is that quick."""
    seconds: float
    tokens_per_second_per_chip: float
    limited_by: Literal["latency", "cache", "max_num_seqs"]
    per_million_tokens: float | None = None
    """What a million of these tokens cost, where a price was given."""


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """The engine."""

    tensor_parallel_size: int
    chips: float
    """Of one engine."""
    engines: int
    """That fit side by side on the topology."""
    hosts: int
    dtype: str
    compute_dtype: str
    cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    attention: str
    """The implementation of paged attention that runs, and why not a faster one."""
    command: str
    """That serves so."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change with which the engine would fit."""

    change: str
    flags: str
    bytes: int
    """That a chip then needs."""


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """A whole plan."""

    name: str
    parameters: int
    topology: str
    chip: str
    platform: str
    num_chips: int
    origin: Origin
    how: str
    engine: EngineReport
    memory: MemoryReport
    decode: tuple[DecodeLatency, ...]
    prompts: tuple[PromptLatency, ...]
    itl_seconds: float | None = None
    """The inter-token latency asked for."""
    largest: tuple[LargestBatch, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    advice: tuple[Advice, ...] = ()
    price: Price | None = None
    """The user's, of a chip and hour."""
    notes: tuple[str, ...] = ()
