"""Rollouts: completions by the model in training, alone or in conversation with an environment.

What brings JAX or the engine with it is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fornax.tune.rollout.completion import (
    Completion,
    Status,
    rollouts_from_arrays,
    rollouts_to_arrays,
)
from fornax.tune.rollout.conversation import ConversationConfig
from fornax.tune.rollout.environment import Environment, Limits, Message, Trajectory, Turn
from fornax.tune.rollout.sampler import Sampler, SamplerStats, StreamSampler
from fornax.tune.rollout.settings import SampleSettings, sample_seed

if TYPE_CHECKING:
    from fornax.tune.rollout.asynchronous import AsyncRollouts
    from fornax.tune.rollout.framing import ChatFraming, Framing, TextFraming
    from fornax.tune.rollout.guessing import GuessNumber, calculate
    from fornax.tune.rollout.llm_sampler import LLMSampler
    from fornax.tune.rollout.replicas import ReplicatedSampler
    from fornax.tune.rollout.tools import Tool, ToolEnvironment, ToolPool
    from fornax.tune.rollout.trajectories import run_trajectories

__all__ = [
    "AsyncRollouts",
    "ChatFraming",
    "Completion",
    "ConversationConfig",
    "Environment",
    "Framing",
    "GuessNumber",
    "LLMSampler",
    "Limits",
    "Message",
    "ReplicatedSampler",
    "SampleSettings",
    "Sampler",
    "SamplerStats",
    "Status",
    "StreamSampler",
    "TextFraming",
    "Tool",
    "ToolEnvironment",
    "ToolPool",
    "Trajectory",
    "Turn",
    "calculate",
    "rollouts_from_arrays",
    "rollouts_to_arrays",
    "run_trajectories",
    "sample_seed",
]

_LATER = {
    "AsyncRollouts": "asynchronous",
    "ChatFraming": "framing",
    "Framing": "framing",
    "GuessNumber": "guessing",
    "LLMSampler": "llm_sampler",
    "ReplicatedSampler": "replicas",
    "TextFraming": "framing",
    "Tool": "tools",
    "ToolEnvironment": "tools",
    "ToolPool": "tools",
    "calculate": "guessing",
    "run_trajectories": "trajectories",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"fornax.tune.rollout.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
