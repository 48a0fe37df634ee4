"""What algorithms ask of whoever writes completions: the seam between training and engines."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from fornax.config.errors import EngineError
from fornax.tune.rollout.completion import Completion
from fornax.tune.rollout.settings import SampleSettings

__all__ = ["Sampler", "SamplerStats", "StreamSampler", "sample_all"]


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
        ...

    def update(self, params: Any, version: int) -> None:
        """Go on with other weights.

        Args:
          params: a `Decoder`, its `nnx.State`, or nested mappings of its arrays, without adapters.
          version: what tokens are tagged with from now on.
        """
        ...

    def stats(self) -> SamplerStats:
        """Sums so far."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class StreamSampler(Sampler, Protocol):
    """A sampler whose requests come and go one by one, as conversations with tools need."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        ...

    def submit(self, prompt: Sequence[int], settings: SampleSettings, seed: int) -> str:
        """Queue a request; returns its name."""
        ...

    def poll(self) -> list[tuple[str, list[Completion]]]:
        """Work a little on what is queued; returns the requests that are done now."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request, at whatever point it is."""
        ...


def sample_all(
    sampler: StreamSampler,
    prompts: Sequence[Sequence[int]],
    settings: SampleSettings,
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """`Sampler.sample` of a sampler that takes single requests.

    Raises:
      EngineError: a prompt or settings that the engine cannot honour; nothing stays queued.
    """
    if len(prompts) != len(seeds):
        raise EngineError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one for each")
    names: list[str] = []
    found: dict[str, list[Completion]] = {}
    try:
        for prompt, seed in zip(prompts, seeds, strict=True):
            names.append(sampler.submit(prompt, settings, seed))
        while len(found) < len(names):
            found.update(sampler.poll())
    finally:
        for name in names:
            if name not in found:
                sampler.cancel(name)
    return [found[name] for name in names]
