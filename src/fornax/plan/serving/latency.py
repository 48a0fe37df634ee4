"""Bounds on the time of a step, and from it of tokens: what must be read, computed, exchanged.

A step's parts follow one another: the layers' products, which wait for the weights or for
arithmetic; attention, which waits for the cache or for arithmetic; exchanges between chips; the
output projection and the choice of tokens. The host's work between steps is not counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fornax.llm.buckets import bucket_for
from fornax.plan.serving.work import Amounts, Attention

__all__ = ["Body", "Clock", "Rates", "Step"]

_OPERATIONS = 50
"""Of a layer, in the programs that XLA makes for TPUs."""
_LOGIT_BYTES = 8
"""Of a logit in float32, written once and read once."""


@dataclass(frozen=True)
class Rates:
    """What one device can do."""

    flops: float
    """Of products, in their dtype."""
    attention: float
    """FLOP/s of attention."""
    bandwidth: float
    """Bytes/s of its memory."""
    exchange: Callable[[str, float], float]
    """(kind of collective, bytes of the whole array) to seconds, among an engine's devices."""
    overhead: float = 0.0
    """Least seconds of an operation."""


@dataclass(frozen=True)
class Body:
    """A step's time without attention and the choice of tokens."""

    weights: float
    """Products that wait for memory."""
    compute: float
    """Products that wait for arithmetic."""
    exchange: float
    compiled: bool = False

    @property
    def seconds(self) -> float:
        """Together."""
        return self.weights + self.compute + self.exchange


@dataclass(frozen=True)
class Step:
    """A step's time, by what it waits for."""

    weights: float
    cache: float
    compute: float
    exchange: float
    sampling: float
    compiled: bool

    @property
    def seconds(self) -> float:
        """Together."""
        return self.weights + self.cache + self.compute + self.exchange + self.sampling

    def __add__(self, other: "Step") -> "Step":
        """One step after another."""
        return Step(
            self.weights + other.weights,
            self.cache + other.cache,
            self.compute + other.compute,
            self.exchange + other.exchange,
            self.sampling + other.sampling,
            self.compiled and other.compiled,
        )


@dataclass(frozen=True)
class Clock:
    """Times of one engine's steps."""

    rates: Rates
    amounts: Amounts
    steps: tuple[int, ...]
    """Sizes of steps in tokens."""
    samples: tuple[int, ...]
    attention: Callable[[int], Attention]
    """By tokens of a step."""
    bodies: Mapping[int, Body]
    """Of steps that were compiled."""
    choices: Mapping[int, float]
    """Seconds of the compiled choices of tokens."""

    def body(self, tokens: int) -> Body:
        """In closed form, for a step of that many tokens."""
        a, rates = self.amounts, self.rates
        written = tokens * a.layers * self.attention(tokens).key_bytes
        read = (a.body_bytes + tokens * a.table_row_bytes + written) / rates.bandwidth
        compute = 2 * tokens * a.body_products / rates.flops
        exchange = 0.0
        if a.reductions:
            exchange = a.reductions * rates.exchange("all-reduce", tokens * a.token_bytes)
        waits = read >= compute
        small = a.layers * _OPERATIONS * rates.overhead
        return Body((read if waits else 0.0) + small, 0.0 if waits else compute, exchange)

    def choice(self, samples: int) -> float:
        """In closed form, the output projection and the greedy choice of that many tokens."""
        a, rates = self.amounts, self.rates
        compute = 2 * samples * a.head_products / rates.flops
        product = max(a.head_bytes / rates.bandwidth, compute)
        return product + samples * a.logits * _LOGIT_BYTES / rates.bandwidth

    def decode(self, batch: int, context: int) -> Step:
        """A step in which each of `batch` sequences of `context` tokens gets one more."""
        size = bucket_for(batch, self.steps)
        work = self.attention(size).decode(batch, context)
        return self._step(size, work, bucket_for(batch, self.samples))

    def prompt(self, tokens: int) -> tuple[Step, int]:
        """The steps of one prompt that has the engine to itself, and how many they are."""
        chunk, total, count = self.steps[-1], None, 0
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            size = bucket_for(stop - start, self.steps)
            work = self.attention(size).prompt(start, stop)
            step = self._step(size, work, 1 if stop == tokens else 0)
            total = step if total is None else total + step
            count += 1
        assert total is not None, "a prompt has tokens"
        return total, count

    def _step(self, size: int, attention: tuple[float, float], samples: int) -> Step:
        body = self.bodies.get(size) or self.body(size)
        read, compute = attention[0] / self.rates.bandwidth, attention[1] / self.rates.attention
        waits = read >= compute
        sampling = 0.0
        if samples:
            known = self.choices.get(samples)
            sampling = self.choice(samples) if known is None else known
        return Step(
            weights=body.weights,
            cache=read if waits else 0.0,
            compute=body.compute + (0.0 if waits else compute),
            exchange=body.exchange,
            sampling=sampling,
            compiled=body.compiled,
        )
