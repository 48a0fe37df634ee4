"""From a config to what a run works with: policy, prompts, rewards, sampler."""

from pathlib import Path
from typing import Any

from fornax.config.errors import ConfigError
from fornax.llm import EngineConfig
from fornax.rewards import RewardPool, RewardSpec
from fornax.tune.data import Limit, load_prompts
from fornax.tune.policy import Origin, policy
from fornax.tune.reward_model import RewardModel, load_reward_model
from fornax.tune.rl.collect import Draw, draw_completions
from fornax.tune.rl.config import RLConfig
from fornax.tune.rl.conversations import Conversations
from fornax.tune.rl.judges import ModelJudge
from fornax.tune.rl.task import Parts
from fornax.tune.rollout import LLMSampler, Sampler
from fornax.tune.splits import codec_of

__all__ = ["make_parts", "reward_pool"]


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
    made = policy(config, origin)
    return Parts(
        build=made.build,
        pretrained=made.pretrained,
        trained=made.trained,
        prompts=prompts,
        judge=pool if judge is None else ModelJudge(judge, config.reward_model_weight, pool),
        sampler=lambda model: _sampler(config, origin, model),
        decode=lambda tokens: origin.tokenizer.decode(tokens, special=True),
        draw=draw,
        notes=(loaded.summary.text(), made.text),
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


def _sampler(config: RLConfig, origin: Origin, model: Any) -> Sampler:
    most = config.rollout.max_num_seqs or min(config.completions, 64)
    engine = EngineConfig(
        max_model_len=config.max_length,
        max_num_seqs=most,
        max_num_batched_tokens=max(2 * most, 64),
        step_sizes="coarse",
    )
    return LLMSampler(model, tokenizer=origin.tokenizer, eos_ids=origin.eos_ids, engine=engine)
