"""Small engines, prompts, and an observer that counts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.unit.models.conftest import CONFIGS, decoder_of

from fornax.llm import LLM, RequestOutput
from fornax.llm.stats import RequestStats, StepStats

__all__ = ["SIZES", "Figures", "completions", "engine_of", "prompts_of"]

SIZES = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
"""Options of engines that meet every case with few tokens."""


@dataclass
class Figures:
    """Adds up what the engine reports."""

    preemptions: int = 0
    most_steps: int = 0
    """Of a call."""
    compiled: list[str] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished_requests: list[RequestStats] = field(default_factory=list)

    def step(self, stats: StepStats) -> None:
        self.preemptions += stats.preemptions
        self.most_steps = max(self.most_steps, stats.steps)
        self.compiled += stats.compiled
        self.drafted += stats.draft_tokens
        self.accepted += stats.accepted_tokens
        self.prefix_queries += stats.prefix_queries
        self.prefix_hits += stats.prefix_hits

    def first_token(self, seconds: float) -> None:
        assert seconds >= 0

    def inter_token(self, seconds: float) -> None:
        assert seconds >= 0

    def finished(self, stats: RequestStats) -> None:
        self.finished_requests.append(stats)


def engine_of(name: str, **options: Any) -> LLM:
    """An engine for the model called `name`: pages of 4 tokens, steps of 8, 4 rows."""
    return LLM(decoder_of(name), **{**SIZES, **options})


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random prompts; the same lengths give the same prompts."""
    rng = np.random.default_rng(lengths)
    size = min(config.vocab_size for config in CONFIGS.values())
    return [rng.integers(0, size, length).tolist() for length in lengths]


def completions(outputs: list[RequestOutput]) -> list[list[int]]:
    """The tokens of each request's first completion."""
    return [output.outputs[0].token_ids for output in outputs]
