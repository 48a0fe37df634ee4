"""vLLM with Fornax's platform and Fornax's own engine, side by side in this process."""

import os

# In this process vLLM's engine is as easy to look into as Fornax's own.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_PLUGINS"] = "fornax"

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.vllm.models import CONFIGS, make

import fornax.llm
import vllm

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96, "block_size": 4}
"""Options, the same for both, that meet every case with few tokens."""


@dataclass(frozen=True)
class Pair:
    """One model in both engines."""

    name: str
    folder: Path
    theirs: Any
    """vLLM's, over Fornax's worker."""
    ours: fornax.llm.LLM

    @property
    def worker(self) -> Any:
        """Fornax's, inside vLLM."""
        return self.theirs.llm_engine.model_executor.driver_worker.worker

    def tokens(self, prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
        """What vLLM completes prompts with; `params` are dicts, one for each or one for all."""
        return [output.outputs[0].token_ids for output in self.outputs(prompts, params, **options)]

    def outputs(self, prompts: list[list[int]], params: Any, **options: Any) -> list[Any]:
        """vLLM's outputs."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [vllm.SamplingParams(**one) for one in each]
        return self.theirs.generate(given, wanted, use_tqdm=False, **options)

    def our_outputs(self, prompts: list[list[int]], params: Any, **options: Any) -> list[Any]:
        """Fornax's outputs."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        wanted = [fornax.llm.SamplingParams(**one) for one in each]
        return self.ours.generate(prompts, wanted, **options)

    def our_tokens(self, prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
        """What Fornax's own engine completes prompts with."""
        outputs = self.our_outputs(prompts, params, **options)
        return [output.outputs[0].token_ids for output in outputs]


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random prompts; the same lengths give the same prompts."""
    rng = np.random.default_rng(lengths)
    return [rng.integers(3, 300, length).tolist() for length in lengths]


def start(folder: Path, **options: Any) -> Any:
    """vLLM over a directory."""
    return vllm.LLM(str(folder), **{**SIZES, **options})


def stop(theirs: Any) -> None:
    """End vLLM's engine and give its memory back."""
    theirs.llm_engine.engine_core.shutdown()
    gc.collect()


@pytest.fixture(scope="session", params=CONFIGS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Each model in turn; vLLM's cache holds one sequence of full length and a half."""
    folder = make(request.param, tmp_path_factory.mktemp("model"))
    theirs = start(folder, num_gpu_blocks_override=37)
    yield Pair(request.param, folder, theirs, fornax.llm.LLM(folder, **SIZES))
    stop(theirs)
