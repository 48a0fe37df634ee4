"""From a config to what a run works with: policy, prompts, rewards, environment, sampler."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import jax
from flax import nnx

from fornax.config import load_name
from fornax.config.addresses import is_loopback
from fornax.config.credentials import Credentials
from fornax.config.errors import ConfigError, DataError
from fornax.llm import EngineConfig
from fornax.mesh import make_mesh
from fornax.models import Decoder, DecoderConfig, routed_experts_dtype
from fornax.rewards import RewardPool, RewardSpec, Sample, Score
from fornax.tune.config import ConversationConfig, RLConfig
from fornax.tune.data import Codec, Encoded, Limit, PromptTokens, load_prompts
from fornax.tune.policy import Origin, policy
from fornax.tune.reward_model import RewardModel, load_reward_model
from fornax.tune.rl.collect import RewardManager, SampleGroups, sample_completions
from fornax.tune.rl.packing import RoutedShape
from fornax.tune.rl.ranks import find_samplers
from fornax.tune.rl.task import Components
from fornax.tune.rollout import (
    ChatFraming,
    Environment,
    Framing,
    Limits,
    LLMSampler,
    PartSampler,
    RemoteSampler,
    ReplicatedSampler,
    Sampler,
    SampleSettings,
    StreamSampler,
    TextFraming,
    Tool,
    ToolEnvironment,
    ToolPool,
    Trajectory,
    run_in_parts,
    run_trajectories,
    split_shards,
)
from fornax.tune.rollout.storage import StateTree
from fornax.tune.splits import codec_of

__all__ = [
    "Conversations",
    "RewardModelScorer",
    "engines_for",
    "make_components",
    "rollout_engine",
    "shard_sampler",
]


_NAME = "reward_model"


@dataclass(frozen=True)
class RewardModelScorer:
    """Adds a reward model's score to those of the reward functions.

    It computes in the trainer's own process; nothing of it changes while a run lasts.
    """

    model: RewardModel
    weight: float
    functions: RewardManager | None = None
    """Such as a `RewardPool`; None: the model alone."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score per sample, in order.

        A completion of a chat is scored as the assistant's message, in the reward model's own
        template. One that the reward model cannot read, or has no room for, counts nothing, and a
        note says why.
        """
        given = (
            [Score(total=0.0, parts={}) for _ in samples]
            if self.functions is None
            else self.functions.score(samples)
        )
        found = [self._encode(sample) for sample in samples]
        readable = [each for each in found if isinstance(each, Encoded)]
        values = iter(self.model.score_encoded(readable).tolist())
        return [
            self._without(score, each) if isinstance(each, str) else self._with(score, next(values))
            for score, each in zip(given, found, strict=True)
        ]

    def _encode(self, sample: Sample) -> Encoded | str:
        """The sample's tokens, or why the reward model cannot read them."""
        codec = self.model.codec
        text = codec.encoder.escape_special(sample.completion)  # it might spell an end of turn
        try:
            if isinstance(sample.prompt, str):
                encoded = codec.completion(sample.prompt, text)
            else:
                asked = [dict(message) for message in sample.prompt]
                answer = {"role": "assistant", "content": text}
                encoded = codec.completion(asked, [answer], sample.tools)
        except DataError as error:
            return str(error)
        if encoded.length > self.model.max_length:
            return f"{encoded.length} tokens, and the reward model reads {self.model.max_length}"
        return encoded

    def _with(self, score: Score, value: float) -> Score:
        parts = {**score.parts, _NAME: value}
        return dataclasses.replace(score, total=score.total + self.weight * value, parts=parts)

    def _without(self, score: Score, why: str) -> Score:
        parts, notes = {**score.parts, _NAME: math.nan}, {**score.notes, _NAME: why}
        return dataclasses.replace(score, parts=parts, notes=notes)

    def state(self) -> StateTree:
        """What the functions remember; the model remembers nothing."""
        return {} if self.functions is None else self.functions.state()

    def restore(self, state: StateTree) -> None:
        """Let the functions remember it again."""
        if self.functions is not None:
            self.functions.restore(state)

    def close(self) -> None:
        """End the functions' processes."""
        if self.functions is not None:
            self.functions.close()


class Conversations:
    """`settings.n` conversations about each prompt, with environments or tools made of a config.

    Those of a prompt have the same task: the record of an environment is the prompt's line of data,
    with the prompt under `prompt`. Conversation i is drawn with the prompt's seed + i;
    `settings.max_tokens` is of one turn. The tools' processes are held until `close`.

    Raises `ConfigError` where environment or tools cannot be used, before anything is drawn.
    """

    def __init__(self, config: ConversationConfig, codec: Codec, *, max_tokens: int) -> None:
        """Nothing is begun yet but processes of tools.

        Args:
          config: what the model talks with.
          codec: of the model.
          max_tokens: of a conversation, after its prompt.
        """
        self._limits = Limits(max_turns=config.max_turns, max_tokens=max_tokens)
        self._framing: Framing
        if codec.template is None:
            if config.tools:
                raise ConfigError(
                    "the model has no chat template, so tools cannot be described to it"
                )
            self._framing = TextFraming(codec)
        else:
            self._framing = ChatFraming(codec, parser=config.tool_parser)
        self._stack = contextlib.ExitStack()
        self._make = self._factory(config)

    def __call__(
        self,
        sampler: Sampler,
        prompts: Sequence[PromptTokens],
        settings: SampleSettings,
        seeds: Sequence[int],
    ) -> list[list[Trajectory]]:
        n, shards = settings.n, getattr(sampler, "shards", None)
        if shards is not None:
            parts = [
                slice(part.start * n, part.stop * n) for part in split_shards(len(prompts), shards)
            ]
            run = functools.partial(run_in_parts, cast("PartSampler", sampler), parts=parts)
        elif hasattr(sampler, "submit"):
            run = functools.partial(run_trajectories, cast("StreamSampler", sampler))
        else:
            raise ConfigError(
                f"{type(sampler).__name__} takes no single requests, which conversations need; use "
                "LLMSampler"
            )
        records = [{**each.record, "prompt": each.prompt} for each in prompts for _ in range(n)]
        found = run(
            self._framing,
            [self._make() for _ in records],
            records,
            replace(settings, n=1),
            [seed + i for seed in seeds for i in range(n)],
            self._limits,
            task_seeds=[seed for seed in seeds for _ in range(n)],
        )
        return [found[i : i + n] for i in range(0, len(found), n)]

    def close(self) -> None:
        """End the tools' processes."""
        self._stack.close()

    def _factory(self, config: ConversationConfig) -> Callable[[], Environment]:
        if config.tools:
            tools = [
                Tool(function=each, timeout_seconds=config.tool_seconds) for each in config.tools
            ]
            pool = self._stack.enter_context(ToolPool(tools, workers=config.tool_workers))
            return lambda: ToolEnvironment(pool)
        try:
            made = load_name(config.environment)
            first: object = made()
        except Exception as error:
            raise ConfigError(
                f"the environment {config.environment} cannot be made: {error}"
            ) from error
        missing = [name for name in ("tools", "reset", "step") if not hasattr(first, name)]
        if missing:
            raise ConfigError(
                f"the environment {config.environment} has no {', '.join(missing)}; see the guide "
                "on rollouts"
            )
        getattr(first, "close", lambda: None)()
        return cast("Callable[[], Environment]", made)


_SHARDS = 8
"""Parts of a round, where the config leaves it open and samplers of their own draw."""

_MOST_SEQUENCES = 256
"""Sequences of an engine, where the config leaves it open: its own default on accelerators."""


def make_components(config: RLConfig, origin: Origin, out: Path) -> Components:
    """Read prompts, start the reward functions, describe policy and sampler.

    In a run of several processes the reward functions are process 0's, which has rollouts drawn.

    Raises:
      ConfigError: a reward, an environment or a tool that cannot be used; what samplers of their
        own cannot do, or only they can; routing replay of a model without experts.
      DataError: prompts that cannot be read, or leave no room for an answer; with their lines.
    """
    samplers = find_samplers()
    _check_samplers(config, samplers is not None)
    routed = _routed(origin.model_config) if config.routing_replay else None
    codec = codec_of(config, origin)
    # A prompt and the longest answer to it fit the window together, so that none is cut by it.
    room = config.max_length - config.rollout.max_tokens
    limit = Limit(max_length=room, too_long=config.too_long)
    loaded = load_prompts(config.data, codec, limit, columns=config.columns or None)
    prompts = loaded.items
    model = None if config.reward_model is None else _reward_model(config)
    first = jax.process_index() == 0
    pool = reward_pool(config, out) if config.reward and first else None
    if pool is not None:
        for prompt in prompts:
            pool.check(prompt.record, prompt.where)
    rewards: RewardManager | None = pool
    if model is not None:
        rewards = RewardModelScorer(model, config.reward_model_weight, pool)
    draw: SampleGroups = sample_completions
    if config.conversation is not None:
        draw = Conversations(config.conversation, codec, max_tokens=config.rollout.max_tokens)
    made = policy(config, origin)
    if samplers is None:
        engine, devices = rollout_engine(config)
        described = _described(engine, len(devices))
    else:
        engine, devices = rollout_engine(config, local=True)
        described = f"rollouts are drawn by {len(samplers[0])} samplers, in {_shards(config)} parts"
    return Components(
        build=made.build,
        pretrained=made.pretrained,
        trained=made.trained,
        prompts=prompts,
        rewards=rewards,
        sampler=functools.partial(_sampler, engine, devices, origin, config.rollout.shards),
        remote=None if samplers is None else functools.partial(_remote, config, *samplers),
        loopback=samplers is None or all(map(is_loopback, samplers[0])),
        decode=lambda tokens: origin.tokenizer.decode(tokens, special=True),
        draw=draw,
        notes=(loaded.summary.text(), made.text, described),
        out=out,
        routed=routed,
    )


def _routed(model: DecoderConfig) -> RoutedShape:
    experts = model.experts
    if experts is None:
        raise ConfigError(
            "routing_replay=True has nothing to replay: this model has no experts; leave it out"
        )
    dtype = routed_experts_dtype(experts)
    return RoutedShape(model.num_expert_layers, experts.experts_per_token, dtype)


def _check_samplers(config: RLConfig, remote: bool) -> None:
    """Refuse what the place where completions are drawn does not do."""
    ahead = 0 if config.asynchronous is None else config.asynchronous.max_staleness
    if not remote and ahead > 1:
        raise ConfigError(
            f"asynchronous.max_staleness={ahead} draws {ahead} rounds ahead, with a version of the "
            "weights for each, which samplers of their own hold: start it with fornax launch "
            "--samplers 2, or use 1"
        )
    processes = jax.process_count()
    if processes > 1 and config.reward_model is not None:
        raise ConfigError(
            f"reward_model={config.reward_model} computes on the devices of one process, and this "
            f"run has {processes}; launch it with --hosts 1, or use reward functions"
        )


def reward_pool(config: RLConfig, out: Path) -> RewardPool:
    """The reward functions' processes; failures go to `rewards.log` of the run directory."""
    specs = [
        RewardSpec(function=reward) if isinstance(reward, str) else reward
        for reward in config.reward
    ]
    return RewardPool(specs, workers=config.reward_workers, log=out / "rewards.log")


def _reward_model(config: RLConfig) -> RewardModel:
    found = load_reward_model(str(config.reward_model))
    if found.max_length < config.max_length:
        raise ConfigError(
            f"reward_model={config.reward_model} was trained on max_length={found.max_length}, and "
            f"this run's sequences have up to max_length={config.max_length}; lower that, or train "
            "a reward model on longer ones"
        )
    return found


def _described(engine: EngineConfig, count: int) -> str:
    """A line on what draws."""
    each = f"{engine.dtype}, {engine.max_num_seqs} sequences at once"
    if engine.tensor_parallel_size > 1:
        each += f", over {engine.tensor_parallel_size} devices"
    return f"rollouts are drawn by {count} engine{'s' * (count > 1)} ({each})"


def rollout_engine(
    config: RLConfig, *, local: bool = False
) -> tuple[EngineConfig, list[list[jax.Device]]]:
    """What each engine is, and the devices of each: the trainer's, with neighbours on its tensor
    axis together.

    Args:
      config: the run.
      local: whether the devices are all that this process has, and no mesh of the trainer's: those
        of a sampler that is a process of its own.

    Raises:
      ConfigError: when there are fewer.
    """
    if local:
        devices, beside = jax.local_devices(), max(config.mesh.tensor, 1)
    else:
        mesh = make_mesh(config.mesh)
        devices, beside = list(mesh.devices.flat), mesh.shape["tensor"]
    platform = devices[0].platform
    engine, data = engines_for(config, platform, len(devices), beside=beside, local=local)
    tensor = engine.tensor_parallel_size
    return engine, [devices[i * tensor : (i + 1) * tensor] for i in range(data)]


def engines_for(
    config: RLConfig, platform: str, devices: int, *, beside: int = 1, local: bool = False
) -> tuple[EngineConfig, int]:
    """What each engine is, and how many draw side by side.

    Args:
      config: the run.
      platform: of the devices; those of a CPU share its cores.
      devices: how many there are.
      beside: of the trainer's tensor axis.
      local: see `rollout_engine`.

    Raises:
      ConfigError: when there are fewer.
    """
    rollout, shared = config.rollout, platform == "cpu"
    shards = _shards(config) if local else rollout.shards or 1
    tensor = rollout.tensor_parallel_size or (1 if shared else beside)
    data = rollout.data_parallel_size or (1 if shared else max(devices // tensor, 1))
    if tensor * data > devices:
        raise ConfigError(
            f"rollout.data_parallel_size={data} engines of rollout.tensor_parallel_size={tensor} "
            f"devices are more than {'a sampler' if local else 'the trainer'}'s {devices}; "
            "lower one of them"
        )
    largest = math.ceil(config.prompts / min(shards, config.prompts)) * config.group_size
    part = math.ceil(largest / data)
    most = rollout.max_num_seqs or min(part, _MOST_SEQUENCES)
    engine = EngineConfig(
        dtype=rollout.dtype or config.dtypes.compute,
        tensor_parallel_size=tensor,
        max_model_len=config.max_length,
        max_num_seqs=most,
        max_num_batched_tokens=rollout.max_num_batched_tokens or max(2 * most, 64),
        kv_cache_dtype=rollout.kv_cache_dtype,
        kv_cache_memory_bytes=rollout.kv_cache_memory_bytes,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        step_sizes="coarse",
        enable_return_routed_experts=config.routing_replay,
    )
    return engine, data


def _shards(config: RLConfig) -> int:
    """Parts of a round that samplers of their own draw."""
    return config.rollout.shards or _SHARDS


def _remote(config: RLConfig, addresses: Sequence[str], credentials: Credentials) -> RemoteSampler:
    ahead = 0 if config.asynchronous is None else config.asynchronous.max_staleness
    return RemoteSampler(
        addresses,
        credentials,
        shards=_shards(config),
        max_model_len=config.max_length,
        versions=ahead + 2,
    )


def shard_sampler(config: RLConfig, origin: Origin) -> LLMSampler | ReplicatedSampler:
    """A sampler on this process's own devices, which draws what a trainer's process 0 asks.

    Its weights are random until the first update.
    """
    engine, devices = rollout_engine(config, local=True)
    model = Decoder(
        origin.model_config,
        rngs=nnx.Rngs(config.seed),
        dtype=config.dtypes.param_dtype,
        compute_dtype=config.dtypes.compute_dtype,
    )
    return _sampler(engine, devices, origin, None, model)


def _sampler(
    engine: EngineConfig,
    devices: Sequence[Sequence[jax.Device]],
    origin: Origin,
    shards: int | None,
    model: Decoder,
) -> LLMSampler | ReplicatedSampler:
    given = {"tokenizer": origin.tokenizer, "eos_ids": origin.eos_ids, "engine": engine}
    if len(devices) == 1:
        return LLMSampler(model, devices=devices[0], shards=shards, **given)
    made = [LLMSampler(model, devices=each, **given) for each in devices]
    return ReplicatedSampler(made, shards=shards)
