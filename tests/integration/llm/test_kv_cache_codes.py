"""Engines whose cache holds keys and values in 8 bits."""

from typing import Any

import pytest
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.unit.models.conftest import decoder_of

from fornax.llm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {**SIZES, "step_sizes": "coarse", "num_scheduler_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codes", "options"),
    [
        ("windowed", "int8", {}),
        ("windowed", "fp8", {"tensor_parallel_size": 2}),
        pytest.param("latent", "fp8", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_do_not_depend_on_company_prefixes_or_preemption(
    name: str, codes: str, options: dict[str, Any]
) -> None:
    """Pages are shared, copied for several samples, given up, and written again."""
    figures = Figures()
    sizes = {**OPTIONS, **options, "kv_cache_dtype": codes}
    prompts, params = prompts_of(21, 17, 9), SamplingParams(temperature=0.0, max_tokens=24)
    alone = LLM(decoder_of(name), **sizes, enable_prefix_caching=False)
    expected = [completions(alone.generate([prompt], params))[0] for prompt in prompts]
    llm = LLM(decoder_of(name), **sizes, num_gpu_blocks_override=20, observer=figures)
    assert completions(llm.generate(prompts, params)) == expected
    assert figures.preemptions > 0
    for _ in range(2):
        assert completions(llm.generate(prompts[:1], params)) == expected[:1]
    assert figures.prefix_hits > 0
    several = SamplingParams(seed=5, max_tokens=6, n=3)
    drawn = [each.generate(prompts[:1], several)[0].outputs for each in (alone, llm)]
    assert [s.token_ids for s in drawn[0]] == [s.token_ids for s in drawn[1]]
