"""The engine's greedy tokens and log probabilities are transformers', family by family.

Pages of 4 tokens, steps of 8, room for one sequence of full length: prompts are cut into chunks,
sequences preempted and computed again, beginnings reused, and everything is batched together.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.memory import let_programs_go
from tests.parity.cases import CASES, build
from tests.parity.conftest import HfModel, make_oracle, oracle_logits

from fornax.llm import LLM, RequestOutput, SamplingParams
from fornax.llm.stats import RequestStats, StepStats

pytestmark = pytest.mark.parity
NEW = 12
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
SIZES = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}

SERVED = (
    "llama-llama3",
    "mistral-window",
    "qwen2-window",
    "qwen3-window",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-inputs",
    "gemma4-moe",
    "olmo2",
    "olmo3",
    "phi4-mini",
    "smollm3-window",
    "glm4-options",
    "ministral3-window",
    "mixtral-window",
    "qwen2-moe-dense-layers",
    "qwen3-moe-options",
    "olmoe-options",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm4-moe",
    "glm4-moe-lite",
    "llama4",
    "llama4-options",
    "minimax-m2-options",
    "mistral4",
    "gpt-oss",
    "qwen3-next",
    "qwen3-next-full-attention",
    "qwen3-5",
    "granite-hybrid",
)
"""Of each family the case that asks most of a paged cache."""

PAGELESS = ("mamba2",)
"""Models without attention: states alone."""
ALIKE = {"granite", "granitemoe", "granitemoeshared"}
"""Families whose every part is in one that is served."""

LINEAR = ("qwen3-next", "qwen3-5", "qwen3-5-moe", "granite-hybrid")
"""Models with states beside pages: a beginning is reused where one is kept."""

_PAGES = dict.fromkeys(
    ("mistral-window", "ministral3-window", "mixtral-window", "qwen3-moe-options"), 9
)
"""Pages of models whose every layer is windowed; all others get one full sequence's 16."""


class Figures:
    """Counts what the tests are about."""

    def __init__(self) -> None:
        self.preemptions = self.drafted = self.accepted = 0
        self.compiled: list[str] = []

    def step(self, stats: StepStats) -> None:
        self.preemptions += stats.preemptions
        self.compiled += stats.compiled
        self.drafted += stats.draft_tokens
        self.accepted += stats.accepted_tokens

    def first_token(self, seconds: float) -> None:
        """Not of interest."""

    def inter_token(self, seconds: float) -> None:
        """Not of interest."""

    def finished(self, stats: RequestStats) -> None:
        """Not of interest."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model in transformers and in the engine."""

    oracle: HfModel
    llm: LLM
    figures: Figures
    shortest: int
    """Prompts are at least this long."""
    pages: int
    """Of the cache's first group."""
    states: bool
    """Whether layers keep states beside pages."""

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Random prompts; the same lengths give the same prompts."""
        rng = np.random.default_rng(lengths)
        return [rng.integers(3, 97, max(n, self.shortest)).tolist() for n in lengths]

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """The oracle's completions, each prompt by itself."""
        return [greedy_tokens(self.oracle, prompt, NEW) for prompt in prompts]


def greedy_tokens(oracle: HfModel, prompt: list[int], count: int) -> list[int]:
    """What transformers' generate says after a prompt."""
    found = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """The tokens of each request's first completion."""
    return [output.outputs[0].token_ids for output in outputs]


def untied_oracle(name: str) -> HfModel:
    """A case's oracle; untied, because a random tied model says one token over and over."""
    config, _ = build(name)
    config.tie_word_embeddings = False
    return make_oracle(config)


def test_every_family_is_served() -> None:
    named = {CASES[name][0] for name in (*SERVED, *PAGELESS, *LINEAR)} | ALIKE
    assert named == {family for family, _, _ in CASES.values()}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small, torch's threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=SERVED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    oracle = untied_oracle(request.param)
    folder: Path = tmp_path_factory.mktemp("oracle")
    oracle.save_pretrained(folder)
    figures = Figures()
    pages = _PAGES.get(request.param, 16)
    states = {"num_state_checkpoints": 16} if request.param in LINEAR else {}
    llm = LLM(folder, **SIZES, **states, num_gpu_blocks_override=pages, observer=figures)
    # An engine made for long sequences uses longrope's long factors from the first token on.
    shortest = 17 if request.param == "phi4-mini" else 1
    yield Pair(oracle, llm, figures, shortest, pages, bool(states))
    assert not figures.compiled, "a program was compiled after the engine was ready"
    assert llm.num_free_pages == llm.num_pages, "pages were not given back"
    let_programs_go()


def test_tokens_agree_through_chunks_batches_and_preemption(pair: Pair) -> None:
    prompts = pair.prompts(3, 40, 17, 25, 1, 9, 31)
    theirs = pair.greedy(prompts)
    assert len({token for row in theirs for token in row}) > 10, "too uniform to tell"
    assert tokens_of(pair.llm.generate(prompts, GREEDY)) == theirs
    assert pair.figures.preemptions > 0, "the cache was large enough for all"


def test_tokens_agree_after_reused_beginnings(pair: Pair) -> None:
    first, other = pair.prompts(22, 6)
    prompts = [first, first[:18] + other, first, first[:14] + other]
    outputs = [pair.llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert tokens_of(outputs) == pair.greedy(prompts)
    cached = [output.num_cached_tokens for output in outputs]
    # In few pages, what was computed longest ago gives way. A state is kept at 8, not at 12.
    last = 8 if pair.states else 12
    assert cached == [0, 16, 20, last] if pair.pages == 16 else cached[:2] == [0, 16]
    more = [first[:21], first[:20] + other, first[:19] + other]
    together = pair.llm.generate(more, GREEDY)
    assert tokens_of(together) == pair.greedy(more)
    assert all(output.num_cached_tokens > 0 for output in together)


def test_a_conversation_goes_on_from_its_own_output(pair: Pair) -> None:
    [prompt] = pair.prompts(18)
    for _ in range(3):
        theirs = pair.greedy([prompt])
        [output] = pair.llm.generate([prompt], GREEDY)
        assert tokens_of([output]) == theirs
        prompt = prompt + theirs[0][: NEW - 1]
    # All but the last answer's last page was there.
    assert output.num_cached_tokens >= len(output.prompt_token_ids) - NEW


def test_log_probabilities_agree(pair: Pair) -> None:
    asked = dataclasses.replace(GREEDY, logprobs=5, prompt_logprobs=3)
    prompts = pair.prompts(13, 26, 5)
    outputs = pair.llm.generate(prompts, [asked, asked, GREEDY])
    for prompt, output in zip(prompts[:2], outputs[:2], strict=True):
        tokens = prompt + output.outputs[0].token_ids
        logits = oracle_logits(pair.oracle, np.array([tokens]))[0].astype(np.float64)
        assert logits.std() > 0.3, "logits too small for the tolerance to mean anything"
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        assert len(found) == len(tokens) - 1
        for place, entries in enumerate(found):
            row = expected[place]
            assert entries is not None
            assert tokens[place + 1] in entries
            assert len(entries) >= (3 if place < len(prompt) - 1 else 5)
            for token, entry in entries.items():
                assert abs(entry.logprob - row[token]) < TOLERANCE


def test_embeddings_agree(pair: Pair) -> None:
    prompts = pair.prompts(19, 7)
    for prompt, output in zip(prompts, pair.llm.embed(prompts), strict=True):
        with torch.no_grad():
            found = pair.oracle.model(torch.tensor([prompt]), use_cache=False)
        hidden = found.last_hidden_state[0, -1].numpy().astype(np.float64)
        np.testing.assert_allclose(
            output.embedding, hidden / np.linalg.norm(hidden), atol=TOLERANCE
        )


@pytest.mark.parametrize("name", [*LINEAR, *PAGELESS])
def test_states_are_taken_back_with_proposed_tokens(name: str, tmp_path: Path) -> None:
    """With prefixes reused, in fewer pages and slots for states than all sequences want."""
    oracle, figures = untied_oracle(name), Figures()
    oracle.save_pretrained(tmp_path)
    llm = LLM(
        tmp_path,
        **SIZES,
        step_sizes="coarse",
        num_gpu_blocks_override=None if name in PAGELESS else 16,
        num_state_checkpoints=3,
        speculative_config={"type": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
        observer=figures,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, length).tolist() * 2 for length in (4, 12, 7, 15, 9)]
    theirs = [greedy_tokens(oracle, prompt, NEW) for prompt in prompts]
    assert tokens_of(llm.generate(prompts, GREEDY)) == theirs
    longer = prompts[-1] + theirs[-1]
    expected = [theirs[-1], greedy_tokens(oracle, longer, NEW)]
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in (prompts[-1], longer)]
    assert tokens_of(outputs) == expected
    assert outputs[1].num_cached_tokens > len(prompts[-1]), "no state of its output was kept"
    assert figures.accepted < figures.drafted
    # A random model of states alone does not repeat itself: all that is proposed is taken back.
    assert (figures.accepted and figures.preemptions) or name in PAGELESS
    assert not figures.compiled


def test_a_short_context_uses_the_short_factors(tmp_path: Path) -> None:
    """Served for no more than the original 16 positions, longrope is transformers' short one."""
    oracle = untied_oracle("phi4-mini")
    oracle.save_pretrained(tmp_path)
    llm = LLM(tmp_path, **{**SIZES, "max_num_batched_tokens": 4}, max_model_len=16)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, length).tolist() for length in (4, 9, 6)]
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    theirs = [greedy_tokens(oracle, prompt, 6) for prompt in prompts]
    assert tokens_of(llm.generate(prompts, short)) == theirs
