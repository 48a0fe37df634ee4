"""The role of vLLM: continuous batching over a paged cache, with vLLM's interface."""

from fornax.llm.config import DraftModel, EngineConfig, NGram
from fornax.llm.llm import LLM
from fornax.llm.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    RequestOutputKind,
)
from fornax.llm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
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
