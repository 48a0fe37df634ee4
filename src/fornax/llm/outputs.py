"""What a request returns: vLLM's output classes, plus the version of the weights of each token."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
]


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """One output, at the end."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position."""

    logprob: float
    """In nats; `EngineConfig.logprobs_mode` says of which distribution."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None = None
    """The token's text."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions, or what is new of it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over all tokens so far; None unless logprobs were asked for."""
    logprobs: list[Mapping[int, Logprob]] | None = None
    """For each of `token_ids`: the sampled token and the most likely ones."""
    finish_reason: str | None = None
    """None while it is running; "stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end-of-text token and others."""
    versions: list[int] = field(default_factory=list)
    """For each of `token_ids`: version of the weights that made it."""
    token_logprobs: list[float] | None = None
    """For each of `token_ids`: its log probability; None unless the request was admitted so."""
    routed_experts: np.ndarray | None = None
    """Integers [prompt + output tokens - 1, layers with experts, experts per token], once it has
    ended: the experts, best first, that each token took; the last token was never read. None unless
    the engine has `enable_return_routed_experts`."""

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's state, or what is new of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    """For each prompt token, None for the first; None unless asked for. In a stream of deltas only
    the first output has it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's embedding."""

    request_id: str
    embedding: list[float]
    """Unit length; the final norm's output at the last token."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
