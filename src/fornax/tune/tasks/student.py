"""The student's own completions, in on-policy distillation: drawn in this process, or by samplers
that are processes of their own."""

import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx

from fornax import adapters
from fornax.config.addresses import is_loopback
from fornax.config.credentials import Credentials
from fornax.config.errors import ConfigError
from fornax.llm import EngineConfig
from fornax.mesh import check_processes
from fornax.models import Decoder
from fornax.tune.config import DistillConfig
from fornax.tune.policy import Origin
from fornax.tune.rl.ranks import NoSampler, RoundLink, find_samplers, host_weights
from fornax.tune.rollout import (
    Completion,
    LLMSampler,
    RemoteSampler,
    Sampler,
    SampleSettings,
    rollouts_from_arrays,
    rollouts_to_arrays,
)

__all__ = ["Student", "check_samplers", "student_sampler"]

_SHARDS = 8
"""Parts of a step's prompts, where the config leaves it open and samplers of their own draw."""
_MOST_SEQUENCES = 64

Prepare = Callable[[Decoder], None]
"""Takes from a merged copy of the model what is not the student's."""


def check_samplers(config: DistillConfig) -> None:
    """Refuse samplers that would draw nothing, and several processes without samplers.

    Raises:
      ConfigError, ClusterError: saying what to do instead.
    """
    given = find_samplers() is not None
    if given and config.on_policy is None:
        raise ConfigError(
            "tune distill draws completions only with on_policy; add --on-policy.share 0.5, or "
            "leave --samplers out"
        )
    if not given and config.on_policy is not None:
        check_processes("on-policy distillation without samplers", jax.process_count())


class Student:
    """Draws with the weights of now; in a run of several processes all of them call it together."""

    def __init__(self, config: DistillConfig, origin: Origin, prepare: Prepare) -> None:
        """Nothing is started yet.

        Args:
          config: of a run with `on_policy`.
          origin: the model, whose tokenizer is used.
          prepare: see `Prepare`.
        """
        self._config, self._origin, self._prepare = config, origin, prepare
        self._remote = find_samplers()
        self._version = 0
        self._model: Callable[[], nnx.Module] | None = None
        self._sampler: Sampler | None = None
        self._link: RoundLink | None = None

    def follow(self, step: int, model: Callable[[], nnx.Module]) -> None:
        """The model to draw from, and the optimizer steps behind it."""
        self._version, self._model = step, model

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """`Sampler.sample`, the same completions in all processes."""
        assert self._model is not None
        student: Decoder = adapters.merged(self._model())
        self._prepare(student)
        if self._remote is None:
            sampler = self._sampler = self._sampler or self._local(student)
            sampler.update(nnx.state(student), self._version)
            return sampler.sample(prompts, settings, seeds)
        first = jax.process_index() == 0
        sampler = self._sampler = self._sampler or self._distant(*self._remote, first=first)
        weights = host_weights(nnx.state(student, nnx.Param), keep=first)
        sampler.update(weights, self._version)

        def drawn(sampler: Sampler, number: int) -> list[list[Completion]]:
            return sampler.sample(prompts, settings, seeds)

        if self._link is not None:
            drawn = self._link.maker(drawn, rollouts_to_arrays, rollouts_from_arrays)
        return drawn(sampler, self._version)

    def close(self) -> None:
        """End the sampler and the connections."""
        if self._sampler is not None:
            self._sampler.close()
        if self._link is not None:
            self._link.close()

    def _local(self, student: Decoder) -> LLMSampler:
        graphdef, state = nnx.split(student)  # the engine is made for one device
        state = jax.device_put(state, jax.local_devices()[0])
        shards = _on_policy_shards(self._config)
        return _engine_sampler(self._config, self._origin, nnx.merge(graphdef, state), shards)

    def _distant(
        self, addresses: Sequence[str], credentials: Credentials, *, first: bool
    ) -> Sampler:
        if jax.process_count() > 1:
            self._link = RoundLink(loopback=all(map(is_loopback, addresses)))
        if not first:
            assert self._link is not None
            return NoSampler(self._link.close)
        made = RemoteSampler(
            addresses,
            credentials,
            shards=_on_policy_shards(self._config) or _SHARDS,
            max_model_len=self._config.max_length,
        )
        if self._link is not None:
            self._link.interrupt = made.interrupt
        return made


def student_sampler(config: DistillConfig, origin: Origin) -> LLMSampler:
    """A sampler on this process's own device, which draws what a trainer's process 0 asks.

    Its weights are random until the first update.
    """
    check_samplers(config)
    model = Decoder(
        origin.model_config,
        rngs=nnx.Rngs(config.seed),
        dtype=config.dtypes.param_dtype,
        compute_dtype=config.dtypes.compute_dtype,
    )
    shards = _on_policy_shards(config) or _SHARDS
    return _engine_sampler(config, origin, model, shards)


def _on_policy_shards(config: DistillConfig) -> int | None:
    return None if config.on_policy is None else config.on_policy.shards


def _engine_sampler(
    config: DistillConfig, origin: Origin, model: Decoder, shards: int | None
) -> LLMSampler:
    part = math.ceil(config.batch_size / min(shards or 1, config.batch_size))
    engine = EngineConfig(
        max_model_len=config.max_length,
        max_num_seqs=min(part, _MOST_SEQUENCES),
        step_sizes="coarse",
    )
    return LLMSampler(
        model, tokenizer=origin.tokenizer, eos_ids=origin.eos_ids, engine=engine, shards=shards
    )
