"""Completions by one serving engine or several, in this process, over the trainer's weights."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fornax.config.errors import EngineError
from fornax.data import Tokenizer
from fornax.llm import EngineConfig, RequestOutputKind, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.engine import Failure
from fornax.llm.outputs import CompletionOutput, RequestOutput
from fornax.llm.stats import RequestStats, StepStats
from fornax.models import Decoder
from fornax.tune.rollout.sampler import (
    SamplerStats,
    SampleSettings,
    Weights,
    check_seeds,
    sample_all,
    split_shards,
)
from fornax.tune.rollout.types import Completion

__all__ = ["LLMSampler", "ReplicatedSampler"]


class LLMSampler:
    """Continuous batching over a paged cache; completions of one prompt share its pages.

    The log-prob of a token is that of the distribution it was drawn from: log-softmax of the
    logits over the temperature, at temperature 1 for greedy requests. Where top-k, top-p or min-p
    leave tokens out it counts those that stay, unless `filtered_logprobs` is False.

    Example:
      sampler = LLMSampler(decoder, tokenizer=tokenizer)
      sampler.update(nnx.state(decoder), version=1)
      groups = sampler.sample([[1, 5, 9]], SampleSettings(n=4, max_tokens=32), seeds=[7])
    """

    def __init__(
        self,
        model: Decoder | str | Path,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        eos_ids: Sequence[int] | None = None,
        engine: EngineConfig | None = None,
        filtered_logprobs: bool = True,
        share: bool = False,
        shards: int | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        """Make an engine and compile its steps.

        Args:
          model: a decoder, or a Hugging Face directory.
          tokenizer: gives completions their text and finds stop texts; None leaves text empty,
            unless the directory has a tokenizer.
          eos_ids: tokens that end a completion; None or none takes the model's own.
          engine: limits; None for the defaults and few sizes of steps, so that it starts sooner.
          filtered_logprobs: whether log-probs count only the tokens that filters keep. False gives
            the trainer's log-probs, which apply no filter.
          share: whether to use the arrays of `update` themselves where they need no new layout.
            They must then live until the next update; a trainer that donates its state gives them
            up at its next step. By default they are copied.
          shards: parts in which `sample` draws its prompts, one after the other and each with an
            empty cache: with the same shards other samplers draw the same bits. None: all together.
          devices: `engine.tensor_parallel_size` of them; None takes the first of JAX's.

        Raises:
          CheckpointError, ConfigError, DataError, EngineError: what is wrong with any of these.
        """
        mode = "processed_logprobs" if filtered_logprobs else "scaled_logprobs"
        config = dataclasses.replace(
            engine or EngineConfig(step_sizes="coarse"),
            logprobs_mode=mode,
            max_logprobs=0,
            enable_lora=False,
        )
        self._figures = _Figures()
        parts = build_engine(
            model, config, tokenizer=tokenizer, observer=self._figures, devices=devices
        )
        self._engine, self._programs = parts.engine, parts.programs
        self._input_processor, self._limits = parts.input_processor, parts.limits
        self._figures.slots = parts.limits.max_num_seqs
        self._eos = tuple(eos_ids) if eos_ids else None
        self._has_text = parts.tokenizer is not None
        self._share, self.shards = share, shards
        self._parts = threading.Lock()
        self._seeds: dict[str, int] = {}
        self._ids = itertools.count()
        self._closed = self._interrupted = False
        self._updates, self._update_seconds = 0, 0.0
        self._programs.compile_all()
        self._programs.wait()

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        return self._limits.max_model_len

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._engine.version

    @property
    def busy(self) -> bool:
        """Whether any request is queued or runs."""
        return bool(self._seeds)

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Completions of each prompt, in order.

        Raises:
          EngineError: a prompt or settings that the engine does not support; nothing stays queued.
        """
        return _sample_shards(self, prompts, settings, seeds)

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See `PartSampler`; parts that several threads ask for are drawn in turns."""
        with self._parts:
            self.reset_prefix_cache()
            return sample_all(self, prompts, settings, seeds)

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left in the cache; those that run begin again."""
        self._engine.scheduler.reset()

    def submit(self, prompt: Sequence[int], settings: SampleSettings, seed: int) -> str:
        """Queue a request; returns its name.

        Raises:
          EngineError: a prompt or settings that the engine does not support, or no tokenizer for
            stop texts.
        """
        self._check_open()
        self.wake()
        name = str(next(self._ids))
        self._engine.add(
            self._input_processor.request(
                np.asarray(prompt, np.int32).tolist(),
                self._params(settings, seed),
                request_id=name,
                token_logprobs=True,
            )
        )
        self._seeds[name] = seed
        return name

    def poll(self) -> list[tuple[str, list[Completion]]]:
        """Go one step of the engine on; returns the requests that are done now.

        Raises:
          EngineError: a request failed; weights that are not numbers, most often.
        """
        self._check_open()
        if self._interrupted:
            raise EngineError("sampling was interrupted; it continues after the next update")
        outputs = self._engine.step() if self._engine.has_work else []
        done = []
        for output in outputs:
            if isinstance(output, Failure):
                raise EngineError(output.message)
            if isinstance(output, RequestOutput):
                seed = self._seeds.pop(output.request_id)
                found = [_completion(each, seed + each.index) for each in output.outputs]
                done.append((output.request_id, found))
        return done

    def cancel(self, request_id: str) -> None:
        """Forget a request, at whatever point it is."""
        if self._seeds.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def interrupt(self) -> None:
        """Make `poll` and `sample` raise EngineError until the next `update`; from any thread."""
        self._interrupted = True

    def update(self, params: Weights, version: int) -> None:
        """Continue with other weights; what runs is recomputed under them, tokens stay.

        Args:
          params: a `Decoder`, its `nnx.State`, or nested mappings of its arrays, all of them and
            without adapters.
          version: what tokens are tagged with from now on.

        Raises:
          EngineError: names or shapes that are not the model's.
        """
        self._check_open()
        self._interrupted = False
        began = time.monotonic()
        weights = self._engine.runner.weights.adopt(params, copy=not self._share)
        self._engine.update_weights(weights, version)
        self._updates += 1
        self._update_seconds += time.monotonic() - began

    def sleep(self) -> None:
        """Give the cache's memory back until the next request."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the cache's memory again."""
        self._engine.wake()

    def stats(self) -> SamplerStats:
        return dataclasses.replace(
            self._figures.sums(), updates=self._updates, update_seconds=self._update_seconds
        )

    def close(self) -> None:
        """Give memory and threads back; the sampler is not useful after it."""
        if self._closed:
            return
        self._closed = True
        for name in list(self._seeds):
            self.cancel(name)
        self._engine.sleep()
        self._input_processor.close()
        self._programs.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the sampler is closed; make another one")

    def _params(self, settings: SampleSettings, seed: int) -> SamplingParams:
        stops = settings.stop_token_ids + (self._eos or () if not settings.ignore_eos else ())
        return SamplingParams(
            n=settings.n,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            seed=seed,
            stop=settings.stop,
            stop_token_ids=stops,
            ignore_eos=settings.ignore_eos or self._eos is not None,
            max_tokens=settings.max_tokens,
            min_tokens=settings.min_tokens,
            detokenize=self._has_text,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _sample_shards(
    sampler: "LLMSampler | ReplicatedSampler",
    prompts: Sequence[Sequence[int]],
    settings: SampleSettings,
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """Completions of each prompt, drawn in the sampler's parts."""
    same = [settings] * len(prompts)
    if sampler.shards is None:
        return sample_all(sampler, prompts, same, seeds)
    check_seeds(prompts, seeds)
    found = []
    for part in split_shards(len(prompts), sampler.shards):
        found += sampler.sample_part(prompts[part], same[part], seeds[part])
    return found


def _completion(output: CompletionOutput, seed: int) -> Completion:
    return Completion(
        tokens=np.array(output.token_ids, np.int32),
        logprobs=np.array(output.token_logprobs, np.float32),
        versions=np.array(output.versions, np.int32),
        mask=np.ones(len(output.token_ids), np.int8),
        finish_reason=output.finish_reason or "abort",
        text=output.text,
        seed=seed,
        routed_experts=output.routed_experts,
    )


class _Figures:
    """The engine's observer: sums over its steps."""

    def __init__(self) -> None:
        self.slots = 0
        self._sums = {"tokens": 0, "prompt_tokens": 0, "steps": 0, "running": 0, "preemptions": 0}
        self._seconds = 0.0
        self._compilations = 0

    def step(self, stats: StepStats) -> None:
        sums = self._sums
        sums["tokens"] += stats.generation_tokens
        sums["prompt_tokens"] += stats.prompt_tokens
        sums["steps"] += 1
        sums["running"] += stats.running
        sums["preemptions"] += stats.preemptions
        self._seconds += stats.seconds
        self._compilations += len(stats.compiled)

    def first_token(self, seconds: float) -> None:
        """Not counted."""

    def inter_token(self, seconds: float) -> None:
        """Not counted."""

    def finished(self, stats: RequestStats) -> None:
        """Not counted."""

    def sums(self) -> SamplerStats:
        return SamplerStats(
            **self._sums,
            seconds=self._seconds,
            slots=self.slots * self._sums["steps"],
            compilations=self._compilations,
        )


class ReplicatedSampler:
    """A `StreamSampler` over samplers that lie on devices of their own and step at the same time.

    A completion depends on its weights, prompt and seed alone, so it does not matter which of them
    draws it; completions of one prompt share the pages of one cache.

    Example:
      samplers = [LLMSampler(model, devices=[device]) for device in jax.devices()]
      sampler = ReplicatedSampler(samplers)
    """

    def __init__(self, samplers: Sequence[LLMSampler], *, shards: int | None = None) -> None:
        """Draw with some samplers.

        Args:
          samplers: each with devices of its own.
          shards: as of `LLMSampler`.
        """
        self._samplers, self.shards = list(samplers), shards
        self._parts = threading.Lock()
        self._load = [0] * len(self._samplers)
        self._places: dict[str, tuple[int, str, int]] = {}
        self._pool = ThreadPoolExecutor(len(self._samplers), "fornax-replica")

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        return self._samplers[0].max_model_len

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        return _sample_shards(self, prompts, settings, seeds)

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See `PartSampler`; parts that several threads ask for are drawn in turns."""
        with self._parts:
            self.reset_prefix_cache()
            return sample_all(self, prompts, settings, seeds)

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left in the caches; those that run begin again."""
        for each in self._samplers:
            each.reset_prefix_cache()

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

    def update(self, params: Weights, version: int) -> None:
        """Continue with other weights, each sampler on its own copy."""
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
        for each in self._samplers:
            each.close()
        self._pool.shutdown()

    def _forget(self, name: str) -> None:
        number, _, count = self._places.pop(name)
        self._load[number] -= count
