"""The same weights and prompts give the same tokens in vLLM and in Fornax's own engine."""

import numpy as np
import pytest
import torch
import transformers
from tests.vllm.conftest import Pair, prompts_of

from fornax.models import generate, load_pretrained

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
MIXED = prompts_of(3, 40, 17, 25, 1, 9, 31, 60)
"""Shorter and longer than a step, and more than there are rows."""


def test_the_platform_is_fornax(pair: Pair) -> None:
    from vllm.platforms import current_platform

    assert current_platform.device_name == "fornax"
    assert type(pair.worker).__module__ == "fornax.llm.vllm_plugin.worker"


def test_greedy_tokens_are_those_of_the_own_engine_and_of_generate(pair: Pair) -> None:
    found = pair.tokens(MIXED, GREEDY)
    assert len({token for row in found for token in row}) > 10, "too uniform to tell"
    assert found == pair.our_tokens(MIXED, GREEDY)
    model = load_pretrained(pair.folder)
    assert found == generate(model, MIXED, max_tokens=12, stop_tokens=())


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        pair.folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, tokens in zip(MIXED, pair.tokens(MIXED, GREEDY), strict=True):
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found[0, len(prompt) :].tolist() == tokens


def test_tokens_survive_preemption(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences of 72 tokens do not fit in 36 pages of 4."""
    preempted = _count_preemptions(pair, monkeypatch)
    params = {**GREEDY, "max_tokens": 48}
    prompts = prompts_of(24, 23, 22, 21, 20, 19)
    assert pair.tokens(prompts, params) == pair.our_tokens(prompts, params)
    assert preempted, "the cache was large enough for all"


def test_reused_beginnings_change_nothing(pair: Pair) -> None:
    [first, other] = prompts_of(30, 8)
    prompts = [first, first[:21] + other, first, first[:16]]
    outputs = [pair.outputs([prompt], GREEDY)[0] for prompt in prompts]
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == pair.our_tokens(prompts, GREEDY)
    assert [output.num_cached_tokens for output in outputs][1:] == [20, 28, 12]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_k": 9},
        {"top_p": 0.6, "min_p": 0.02},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logit_bias": {5: 40.0, 7: 40.0, 11: -100.0}, "min_tokens": 4},
        {"allowed_token_ids": list(range(3, 40))},
        {"temperature": 0.0, "repetition_penalty": 1.8},
    ],
    ids=lambda params: "-".join(params) or "plain",
)
def test_seeded_tokens_are_those_of_the_own_engine(pair: Pair, params: dict) -> None:
    """Random bits come from seed and position in both, so draws agree token by token."""
    each = [{"temperature": 1.0, "max_tokens": 20, "seed": s, **params} for s in range(6)]
    prompts = prompts_of(5, 30, 12, 1, 22, 7)
    found = pair.tokens(prompts, each)
    assert found == pair.our_tokens(prompts, each)
    assert pair.tokens(prompts[2:3], each[2:3]) == found[2:3], "alone it draws other tokens"


def test_bad_words_are_avoided(pair: Pair) -> None:
    tokenizer = pair.theirs.get_tokenizer()
    [free] = pair.tokens(prompts_of(7), GREEDY)
    texts = {token: tokenizer.decode([token]) for token in free}
    token, word = next((t, x) for t, x in texts.items() if tokenizer.encode(x) == [t])
    params = {**GREEDY, "bad_words": [word]}
    [found] = pair.tokens(prompts_of(7), params)
    assert token not in found
    assert [found] == pair.our_tokens(prompts_of(7), params)


def test_requests_without_a_seed_draw_their_own(pair: Pair) -> None:
    params = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    first, second = pair.tokens(prompts_of(6) * 2, params)
    assert first != second


def test_log_probabilities_agree(pair: Pair) -> None:
    """Those of sampled tokens and of prompts, over chunks, mixed with requests that want none."""
    prompts = prompts_of(50, 4, 1, 19)
    asked = [
        {**GREEDY, "logprobs": 5, "prompt_logprobs": 3},
        GREEDY,
        {**GREEDY, "prompt_logprobs": 2},
        {**GREEDY, "logprobs": 0},
    ]
    for theirs, ours in zip(
        pair.outputs(prompts, asked), pair.our_outputs(prompts, asked), strict=True
    ):
        assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
        _agree(theirs.outputs[0].logprobs, ours.outputs[0].logprobs)
        _agree(theirs.prompt_logprobs, ours.prompt_logprobs)


def test_the_end_of_text_ends_a_completion(pair: Pair) -> None:
    [free] = pair.tokens(prompts_of(11), GREEDY)
    [output] = pair.outputs(prompts_of(11), {**GREEDY, "stop_token_ids": [free[5]]})
    place = free.index(free[5])
    assert output.outputs[0].token_ids == free[: place + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_several_completions_of_a_prompt(pair: Pair) -> None:
    params = {"temperature": 1.0, "seed": 4, "n": 3, "max_tokens": 8, "ignore_eos": True}
    [theirs], [ours] = (
        pair.outputs(prompts_of(13), params),
        pair.our_outputs(prompts_of(13), params),
    )
    assert [one.token_ids for one in theirs.outputs] == [one.token_ids for one in ours.outputs]


def test_nothing_is_compiled_while_serving(pair: Pair) -> None:
    pair.tokens(MIXED, GREEDY)
    assert pair.worker._programs.late == []


def _agree(theirs: list | None, ours: list | None) -> None:
    assert (theirs is None) == (ours is None)
    for place, (row, other) in enumerate(zip(theirs or [], ours or [], strict=True)):
        assert (row is None) == (other is None), place
        if row is not None:
            assert row.keys() == other.keys()
            values = [[side[token].logprob for token in row] for side in (row, other)]
            np.testing.assert_allclose(*values, atol=1e-4)
            assert {t: x.rank for t, x in row.items()} == {t: x.rank for t, x in other.items()}


def _count_preemptions(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Request ids that vLLM's scheduler preempts from now on."""
    scheduler = pair.theirs.llm_engine.engine_core.engine_core.scheduler
    seen: list[str] = []
    preempt = scheduler._preempt_request

    def record(request, *args, **kwargs):
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    return seen
