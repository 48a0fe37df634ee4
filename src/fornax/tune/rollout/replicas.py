"""Data parallelism: several engines of one model, each request on one of them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from fornax.tune.rollout.completion import Completion
from fornax.tune.rollout.llm_sampler import LLMSampler
from fornax.tune.rollout.sampler import SamplerStats, sample_all
from fornax.tune.rollout.settings import SampleSettings

__all__ = ["ReplicatedSampler"]


class ReplicatedSampler:
    """A `StreamSampler` over samplers that lie on devices of their own and step at the same time.

    A completion depends on its weights, prompt and seed alone, so it does not matter which of them
    draws it; completions of one prompt share the pages of one cache.

    Example:
      samplers = [LLMSampler(model, devices=[device]) for device in jax.devices()]
      sampler = ReplicatedSampler(samplers)
    """

    def __init__(self, samplers: Sequence[LLMSampler]) -> None:
        """Take them over; `close` closes them."""
        self._samplers = list(samplers)
        self._load = [0] * len(self._samplers)
        self._places: dict[str, tuple[int, str, int]] = {}
        self._pool = ThreadPoolExecutor(len(self._samplers), "fornax-replica")

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once, at most."""
        return sum(each.max_num_seqs for each in self._samplers)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        return self._samplers[0].max_model_len

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `Sampler.sample`."""
        return sample_all(self, prompts, settings, seeds)

    def submit(self, prompt: Sequence[int], settings: SampleSettings, seed: int) -> str:
        """Queue a request where the fewest completions wait; returns its name."""
        number = min(range(len(self._load)), key=self._load.__getitem__)
        inner = self._samplers[number].submit(prompt, settings, seed)
        name = f"{number}/{inner}"
        self._places[name] = (number, inner, settings.n)
        self._load[number] += settings.n
        return name

    def poll(self) -> list[tuple[str, list[Completion]]]:
        """One step of each engine that has work; returns the requests that are done now."""
        busy = [number for number, load in enumerate(self._load) if load]
        stepped = list(self._pool.map(lambda number: self._samplers[number].poll(), busy))
        done = []
        for number, found in zip(busy, stepped, strict=True):
            for inner, completions in found:
                name = f"{number}/{inner}"
                self._forget(name)
                done.append((name, completions))
        return done

    def cancel(self, request_id: str) -> None:
        """Forget a request, at whatever point it is."""
        if request_id in self._places:
            number, inner, _ = self._places[request_id]
            self._samplers[number].cancel(inner)
            self._forget(request_id)

    def interrupt(self) -> None:
        """Make `poll` and `sample` raise EngineError until the next `update`; from any thread."""
        for each in self._samplers:
            each.interrupt()

    def update(self, params: Any, version: int) -> None:
        """Go on with other weights, each sampler on its own copy."""
        for each in self._samplers:
            each.update(params, version)

    def stats(self) -> SamplerStats:
        """Sums over all; `seconds` is the longest of them, because they draw side by side, and
        `updates` counts those of one."""
        each = [sampler.stats() for sampler in self._samplers]
        sums: dict[str, Any] = {
            field.name: sum(getattr(one, field.name) for one in each)
            for field in fields(SamplerStats)
        }
        sums |= {name: max(getattr(one, name) for one in each) for name in ("seconds", "updates")}
        return SamplerStats(**sums)

    def close(self) -> None:
        """Close them all."""
        for each in self._samplers:
            each.close()
        self._pool.shutdown()

    def _forget(self, name: str) -> None:
        number, _, count = self._places.pop(name)
        self._load[number] -= count
