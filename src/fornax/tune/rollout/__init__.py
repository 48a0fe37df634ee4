"""Rollouts: completions by the model in training, alone or in conversation with an environment.

What brings JAX or the engine with it is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING

from fornax.tune.rollout.sampler import (
    PartSampler,
    Sampler,
    SamplerStats,
    SampleSettings,
    StreamSampler,
    sample_seed,
    split_shards,
)
from fornax.tune.rollout.storage import rollouts_from_arrays, rollouts_to_arrays
from fornax.tune.rollout.types import (
    Completion,
    Environment,
    Limits,
    Message,
    Status,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from fornax.tune.rollout.asynchronous import AsyncRollouts
    from fornax.tune.rollout.framing import ChatFraming, Framing, TextFraming
    from fornax.tune.rollout.llm_sampler import LLMSampler, ReplicatedSampler
    from fornax.tune.rollout.remote import RemoteSampler
    from fornax.tune.rollout.sampler_server import SamplerServer
    from fornax.tune.rollout.tools import Tool, ToolEnvironment, ToolPool
    from fornax.tune.rollout.toy_environments import GuessNumber, calculate
    from fornax.tune.rollout.trajectories import run_in_parts, run_trajectories

__all__ = [
    "AsyncRollouts",
    "ChatFraming",
    "Completion",
    "Environment",
    "Framing",
    "GuessNumber",
    "LLMSampler",
    "Limits",
    "Message",
    "PartSampler",
    "RemoteSampler",
    "ReplicatedSampler",
    "SampleSettings",
    "Sampler",
    "SamplerServer",
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
    "run_in_parts",
    "run_trajectories",
    "sample_seed",
    "split_shards",
]

_LATER = {
    "AsyncRollouts": "asynchronous",
    "ChatFraming": "framing",
    "Framing": "framing",
    "GuessNumber": "toy_environments",
    "LLMSampler": "llm_sampler",
    "RemoteSampler": "remote",
    "ReplicatedSampler": "llm_sampler",
    "SamplerServer": "sampler_server",
    "TextFraming": "framing",
    "Tool": "tools",
    "ToolEnvironment": "tools",
    "ToolPool": "tools",
    "calculate": "toy_environments",
    "run_in_parts": "trajectories",
    "run_trajectories": "trajectories",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(f"fornax.tune.rollout.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
