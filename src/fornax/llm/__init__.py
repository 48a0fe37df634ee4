"""The role of vLLM: continuous batching over a paged cache, with vLLM's interface.

`LLM` brings JAX and the models with it, so it is imported when it is first asked for: the load
generator and the request tables need neither.
"""

from typing import TYPE_CHECKING

from fornax.llm.config import MTP, DraftModel, EngineConfig, NGram
from fornax.llm.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    RequestOutputKind,
)
from fornax.llm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from fornax.llm.llm import LLM

__all__ = [
    "LLM",
    "MTP",
    "CompletionOutput",
    "DraftModel",
    "EmbeddingOutput",
    "EngineConfig",
    "Logprob",
    "NGram",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from fornax.llm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
