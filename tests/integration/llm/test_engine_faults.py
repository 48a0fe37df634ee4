"""What goes wrong ends where it began: the requests beside it, and after it, are served."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tests.integration.llm.helpers import completions, engine_of, prompts_of
from tests.unit.models.conftest import decoder_of

from fornax.config.errors import EngineError
from fornax.llm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine_of("windowed", num_gpu_blocks_override=16)


@pytest.mark.slow
def test_prompt_scores_are_complete_when_chunks_differ_after_a_preemption(llm: LLM) -> None:
    """The long prompt is preempted half way and cut elsewhere when it comes back."""
    prompts = prompts_of(2, 11, 35)
    several = [
        SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            prompt_logprobs=1,
        )
        for count in (9, 14, 16)
    ]
    together = llm.generate(prompts, several)
    for prompt, output, params in zip(prompts, together, several, strict=True):
        [alone] = llm.generate([prompt], params)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs == alone.prompt_logprobs


def test_a_call_that_fails_leaves_no_request_behind(llm: LLM) -> None:
    good = completions(llm.generate(prompts_of(9), GREEDY))
    _, state = nnx.split(decoder_of("windowed"))
    llm.update_weights(jax.tree.map(lambda leaf: leaf * jnp.nan, state), version=1)
    with pytest.raises(EngineError, match="not a number"):
        llm.generate(prompts_of(3, 30, 30), GREEDY)
    assert llm.num_free_pages == llm.num_pages
    llm.update_weights(decoder_of("windowed"), version=2)
    assert completions(llm.generate(prompts_of(9), GREEDY)) == good


def test_a_sleeping_engine_says_so(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(EngineError, match="wake"):
        llm.generate(prompts_of(9), GREEDY)
    with pytest.raises(EngineError, match="wake"):
        llm.embed(prompts_of(9))
    llm.wake()
    assert len(completions(llm.generate(prompts_of(9), GREEDY))[0]) == 12
