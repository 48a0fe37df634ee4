"""From a config to what a run works with: policy, prompts, rewards, sampler."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fornax.config.errors import ConfigError
from fornax.llm import EngineConfig
from fornax.mesh import make_mesh
from fornax.rewards import RewardPool, RewardSpec
from fornax.tune.data import Limit, load_prompts
from fornax.tune.policy import Origin, policy
from fornax.tune.reward_model import RewardModel, load_reward_model
from fornax.tune.rl.collect import Draw, draw_completions
from fornax.tune.rl.config import RLConfig
from fornax.tune.rl.conversations import Conversations
from fornax.tune.rl.judges import ModelJudge
from fornax.tune.rl.task import Parts
from fornax.tune.rollout import LLMSampler, ReplicatedSampler, Sampler
from fornax.tune.splits import codec_of

__all__ = ["make_parts", "reward_pool", "rollout_engine"]

_MOST_SEQUENCES = 256
"""Sequences of an engine, where the config leaves it open: its own default on accelerators."""


def make_parts(config: RLConfig, origin: Origin, out: Path) -> Parts:
    """Read prompts, start the reward functions, describe policy and sampler.

    Raises:
      ConfigError: a reward, an environment or a tool that cannot be used.
      DataError: prompts that cannot be read, or leave no room for an answer; with their lines.
    """
    codec = codec_of(config, origin)
    # A prompt and the longest answer to it fit the window together, so that none is cut by it.
    room = config.max_length - config.rollout.max_tokens
    limit = Limit(max_length=room, too_long=config.too_long)
    loaded = load_prompts(config.data, codec, limit, columns=config.columns or None)
    prompts = loaded.items
    judge = None if config.reward_model is None else _reward_model(config)
    pool = reward_pool(config, out) if config.reward else None
    if pool is not None:
        for prompt in prompts:
            pool.check(prompt.record, prompt.where)
    draw: Draw = draw_completions
    if config.conversation is not None:
        draw = Conversations(config.conversation, codec, max_tokens=config.rollout.max_tokens)
    engine, devices = rollout_engine(config)
    made = policy(config, origin)
    return Parts(
        build=made.build,
        pretrained=made.pretrained,
        trained=made.trained,
        prompts=prompts,
        judge=pool if judge is None else ModelJudge(judge, config.reward_model_weight, pool),
        sampler=functools.partial(_sampler, engine, devices, origin),
        decode=lambda tokens: origin.tokenizer.decode(tokens, special=True),
        draw=draw,
        notes=(loaded.summary.text(), made.text, _described(engine, len(devices))),
        out=out,
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


def rollout_engine(config: RLConfig) -> tuple[EngineConfig, list[list[jax.Device]]]:
    """What each engine is, and the devices of each: the trainer's, with neighbours on its tensor
    axis together.

    Raises:
      ConfigError: when the trainer has fewer.
    """
    mesh, rollout = make_mesh(config.mesh), config.rollout
    devices = list(mesh.devices.flat)
    shared = devices[0].platform == "cpu"
    tensor = rollout.tensor_parallel_size or (1 if shared else mesh.shape["tensor"])
    data = rollout.data_parallel_size or (1 if shared else max(len(devices) // tensor, 1))
    if tensor * data > len(devices):
        raise ConfigError(
            f"rollout.data_parallel_size={data} engines of rollout.tensor_parallel_size={tensor} "
            f"devices are more than the trainer's {len(devices)}; lower one of them"
        )
    part = math.ceil(config.completions / data)
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
    )
    return engine, [devices[i * tensor : (i + 1) * tensor] for i in range(data)]


def _sampler(
    engine: EngineConfig, devices: Sequence[Sequence[jax.Device]], origin: Origin, model: Any
) -> Sampler:
    made = [
        LLMSampler(
            model, tokenizer=origin.tokenizer, eos_ids=origin.eos_ids, engine=engine, devices=each
        )
        for each in devices
    ]
    return made[0] if len(made) == 1 else ReplicatedSampler(made)
