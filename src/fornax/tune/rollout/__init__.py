"""Rollouts: completions by the model in training, alone or in conversation with an environment.

`LLMSampler` brings JAX and the engine with it, so it is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from fornax.tune.rollout.completion import Completion, rollouts_from_arrays, rollouts_to_arrays
from fornax.tune.rollout.sampler import Sampler, SamplerStats, StreamSampler
from fornax.tune.rollout.settings import SampleSettings, sample_seed

if TYPE_CHECKING:
    from fornax.tune.rollout.llm_sampler import LLMSampler

__all__ = [
    "Completion",
    "LLMSampler",
    "SampleSettings",
    "Sampler",
    "SamplerStats",
    "StreamSampler",
    "rollouts_from_arrays",
    "rollouts_to_arrays",
    "sample_seed",
]


def __getattr__(name: str) -> Any:
    if name == "LLMSampler":
        from fornax.tune.rollout.llm_sampler import LLMSampler

        return LLMSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
