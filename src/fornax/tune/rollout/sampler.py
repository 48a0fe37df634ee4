"""The sampler's protocol, its settings and figures: what training needs of an engine."""

import hashlib
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

from fornax.config.errors import ConfigError, EngineError
from fornax.tune.rollout.types import Completion

__all__ = [
    "PartSampler",
    "Requests",
    "SampleSettings",
    "Sampler",
    "SamplerStats",
    "StreamSampler",
    "check_seeds",
    "sample_all",
    "sample_seed",
    "split_shards",
]


Weights = object
"""A `Decoder`, its `nnx.State`, or nested mappings of its arrays, without adapters."""


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How completions are drawn, and where they end."""

    n: int = 1
    """Completions of each prompt."""
    temperature: float = 1.0
    """The logits are divided by it; 0 takes the most likely token, for n=1 only."""
    top_p: float = 1.0
    """Keeps the most likely tokens that together reach this probability."""
    top_k: int = 0
    """Keeps this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this share as likely as the most likely one."""
    max_tokens: int = 256
    """Longest completion, in tokens."""
    min_tokens: int = 0
    """Tokens before which a completion does not end."""
    stop: tuple[str, ...] = ()
    """Text that ends a completion; its tokens stay."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens, besides the model's end tokens, that end a completion; they stay."""
    ignore_eos: bool = False
    """Continues after the model's end token."""

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("max_tokens", 1), ("min_tokens", 0), ("top_k", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature={self.temperature} must be from 0 to 2")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} must be from 0 to 1")
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"n={self.n} at temperature=0 would be {self.n} times the same completion; raise "
                "the temperature, or use n=1"
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it"
            )


@dataclass(frozen=True, kw_only=True)
class SamplerStats:
    """Sums since a sampler began; `later.minus(earlier)` gives those in between."""

    tokens: int = 0
    """Tokens drawn."""
    prompt_tokens: int = 0
    """Prompt tokens computed; those found in the prefix cache are not among them."""
    seconds: float = 0.0
    """Time spent drawing them."""
    steps: int = 0
    """Steps of the engine."""
    running: int = 0
    """Sequences in each step, summed."""
    slots: int = 0
    """Sequences that each step had room for, summed."""
    preemptions: int = 0
    """Sequences pushed out of the cache: computed again, and a reason to give it more memory."""
    updates: int = 0
    """Times that weights were taken over."""
    update_seconds: float = 0.0
    """Time spent on it."""
    compilations: int = 0
    """Programs compiled although all had been: 0, unless something is wrong."""

    @property
    def occupancy(self) -> float:
        """Sequences in a step over what it has room for, on average; 0 before the first."""
        return self.running / self.slots if self.slots else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens drawn in a second of drawing; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def minus(self, earlier: Self) -> Self:
        """What happened after `earlier`."""
        names = [each.name for each in fields(self)]
        return type(self)(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class Sampler(Protocol):
    """Writes completions with weights that a trainer updates. One thread at a time calls it."""

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Completions of each prompt, in order.

        Args:
          prompts: token ids.
          settings: for all of them; `n` completions each.
          seeds: one for each prompt; completion i is drawn with seed + i.
        """

    def update(self, params: Weights, version: int) -> None:
        """Continue with other weights.

        Args:
          params: all of them.
          version: what tokens are tagged with from now on.
        """

    def stats(self) -> SamplerStats:
        """Sums so far."""

    def close(self) -> None:
        """Give everything back."""


class Requests(Protocol):
    """Requests that come and go one by one, as conversations with tools need."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, at most."""

    def submit(self, prompt: Sequence[int], settings: SampleSettings, seed: int) -> str:
        """Queue a request; returns its name."""

    def poll(self) -> list[tuple[str, list[Completion]]]:
        """Work a little on what is queued; returns the requests that are done now."""

    def cancel(self, request_id: str) -> None:
        """Forget a request, at whatever point it is."""


class StreamSampler(Sampler, Requests, Protocol):
    """A sampler that takes single requests too."""


class PartSampler(Sampler, Protocol):
    """A sampler that draws parts of a round, each with the bits that it has alone."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, at most."""

    @property
    def shards(self) -> int | None:
        """Parts in which rounds are drawn; None: in one batch that prompts join as they come."""

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """Completions of prompts that are drawn together, beginning with an empty cache.

        Several threads may call it at once.

        Args:
          prompts: token ids.
          settings: one for each prompt.
          seeds: one for each prompt; completion i is drawn with seed + i.
        """


def sample_all(
    sampler: StreamSampler,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SampleSettings],
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """`Sampler.sample` of a sampler that takes single requests, with settings for each prompt.

    Raises:
      EngineError: a prompt or settings that the engine does not support; nothing stays queued.
    """
    check_seeds(prompts, seeds)
    names: list[str] = []
    found: dict[str, list[Completion]] = {}
    try:
        for prompt, each, seed in zip(prompts, settings, seeds, strict=True):
            names.append(sampler.submit(prompt, each, seed))
        while len(found) < len(names):
            found.update(sampler.poll())
    finally:
        for name in names:
            if name not in found:
                sampler.cancel(name)
    return [found[name] for name in names]


def check_seeds(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
    """Refuse seeds that are not one for each prompt.

    Raises:
      EngineError: saying how many there are.
    """
    if len(prompts) != len(seeds):
        raise EngineError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one for each")


def split_shards(prompts: int, shards: int) -> list[slice]:
    """Consecutive parts of this many prompts, as equal as can be; fewer where prompts are few."""
    count = max(1, min(prompts, shards))
    edges = [prompts * n // count for n in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def sample_seed(run_seed: int, step: int, prompt: int, sample: int = 0) -> int:
    """The seed of one request: 63 bits that differ wherever any of the four does.

    A sampler draws completion i of a request with seed + i, each token with random bits of its
    own place, whatever else is in the batch.

    Args:
      run_seed: of the run.
      step: the round of rollouts.
      prompt: which prompt of the round.
      sample: which completion of the prompt, where each is a request of its own.
    """
    packed = struct.pack(">4q", run_seed, step, prompt, sample)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"fornax rollout").digest()
    return int.from_bytes(digest, "big") >> 1
