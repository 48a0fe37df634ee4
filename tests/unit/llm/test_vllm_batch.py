"""What vLLM's scheduler sends becomes plans with rows, pages and samples; without vLLM."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.config.errors import EngineError
from fornax.llm.sampling_params import REFUSED, SamplingParams
from fornax.llm.scheduler_output import SchedulerOutput
from fornax.llm.vllm_plugin.batch import Batch, sampling_params

VOCAB = 50
PAGE = 4


@dataclasses.dataclass
class Params:
    """As much of vLLM's `SamplingParams` as the worker reads."""

    bad_words_token_ids: Any = None
    all_stop_token_ids: Any = frozenset()

    def __getattr__(self, name: str) -> Any:
        default = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
        if name not in default:
            raise AttributeError(name)
        return default[name]


@dataclasses.dataclass
class New:
    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    sampling_params: Any = dataclasses.field(default_factory=Params)
    prefill_token_ids: list[int] | None = None
    mm_features: tuple = ()
    lora_request: Any = None


@dataclasses.dataclass
class Cached:
    req_ids: list[str] = dataclasses.field(default_factory=list)
    new_block_ids: list[Any] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)
    resumed_req_ids: set[str] = dataclasses.field(default_factory=set)
    all_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[New] = dataclasses.field(default_factory=list)
    scheduled_cached_reqs: Cached = dataclasses.field(default_factory=Cached)
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    kv_cache_block_copies: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def batch_of(rows: int = 2, groups: int = 2) -> Batch:
    return Batch(rows=rows, groups=groups, vocab_size=VOCAB, seed=0)


def tables(plan: SchedulerOutput) -> dict[tuple[int, int, int], int]:
    return {(u.group, u.row, u.index): u.page for u in plan.updates}


def sampled(plan: SchedulerOutput, token: int = 7) -> None:
    for sample in plan.samples:
        sample.sequence.tokens.append(token)


def test_a_prompt_in_two_chunks_then_decodes() -> None:
    batch = batch_of()
    prompt = list(range(6))
    plan = batch.plan(Scheduled({"a": 4}, [New("a", prompt, ([5, 6],))]))
    [entry] = plan.entries
    assert (entry.start, entry.count, plan.num_tokens, plan.samples) == (0, 4, 4, [])
    assert plan.started == [entry.sequence]
    row = entry.row
    assert tables(plan) == {(g, row, i): page for g in (0, 1) for i, page in enumerate((5, 6))}
    plan = batch.plan(Scheduled({"a": 2}, [], Cached(["a"], [None], [4])))
    [sample] = plan.samples
    assert (sample.offset, sample.position, sample.row) == (1, 6, row)
    assert not plan.updates
    assert not plan.started
    sampled(plan)
    plan = batch.plan(Scheduled({"a": 1}, [], Cached(["a"], [([9],)], [6])))
    assert plan.samples[0].position == 7
    assert tables(plan) == {(0, row, 2): 9, (1, row, 2): 9}


def test_a_resumed_request_gets_other_pages_and_starts_anew() -> None:
    batch = batch_of(rows=1)
    sampled(batch.plan(Scheduled({"a": 3}, [New("a", [1, 2, 3], ([4],))])))
    batch.plan(Scheduled({"b": 2}, [New("b", [1, 2], ([5],))]))  # takes the only row
    cached = Cached(["a"], [([8],)], [0], {"a"}, {"a": [1, 2, 3, 7]})
    plan = batch.plan(Scheduled({"a": 4}, [], cached, {"b"}))
    assert [s.request_id for s in plan.started] == ["a"]
    assert tables(plan) == {(0, 0, 0): 8, (1, 0, 0): 8}
    assert plan.samples[0].position == 4
    assert plan.entries[0].sequence.output == [7]


def test_a_resumed_request_may_come_as_a_new_one() -> None:
    """As vLLM's second model runner has it."""
    batch = batch_of(rows=1)
    sampled(batch.plan(Scheduled({"a": 3}, [New("a", [1, 2, 3], ([4],))])))
    again = New("a", [1, 2, 3], ([6],), prefill_token_ids=[1, 2, 3, 7])
    plan = batch.plan(Scheduled({"a": 4}, [again]))
    assert plan.entries[0].sequence.output == [7]
    assert plan.samples[0].position == 4
    assert len(plan.started) == 1


def test_block_copies_are_made_in_every_group() -> None:
    plan = batch_of().plan(
        Scheduled({"a": 1}, [New("a", [1], ([4],))], kv_cache_block_copies=[(3, 4)])
    )
    assert [tuple(copy) for copy in plan.copies] == [(0, 3, 4), (1, 3, 4)]


def test_a_seed_is_drawn_where_none_is_given() -> None:
    batch = batch_of()
    batch.plan(Scheduled({"a": 1, "b": 1}, [New("a", [1], ([4],)), New("b", [1], ([5],))]))
    seeds = [request.seed for request in batch.requests.values()]
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"flat_logprobs"}))
def test_refused_parameters_are_refused_by_name(name: str) -> None:
    params = Params()
    setattr(params, name, [1])
    with pytest.raises(EngineError, match=name):
        sampling_params(params)


def test_embeddings_are_refused() -> None:
    with pytest.raises(EngineError, match="only completions"):
        sampling_params(object())


@given(st.data())
def test_rows_are_never_shared(data: st.DataObject) -> None:
    """Whatever runs, pauses and ends, requests of a step have rows of their own and all pages."""
    rows = data.draw(st.integers(1, 4))
    batch, mirror, alive, names = batch_of(rows, 1), {}, {}, iter(range(1000))
    for _ in range(data.draw(st.integers(1, 12))):
        finished = data.draw(st.sets(st.sampled_from(sorted(alive)))) if alive else set()
        for name in finished:
            del alive[name]
        running = data.draw(st.lists(st.sampled_from(sorted(alive)), unique=True)) if alive else []
        running = running[:rows]
        fresh = [
            f"r{next(names):03}" for _ in range(data.draw(st.integers(0, rows - len(running))))
        ]
        cached = Cached(running, [None] * len(running), [alive[name][1] for name in running])
        for place, name in enumerate(running):
            pages, length = alive[name]
            if length == len(pages) * PAGE:
                cached.new_block_ids[place] = ([int(name[1:]) * 100 + len(pages) + 1],)
                pages.append(cached.new_block_ids[place][0][0])
        new = []
        for name in fresh:
            alive[name] = [[int(name[1:]) * 100 + 1], 0]
            new.append(New(name, [1], (list(alive[name][0]),)))
        counts: Mapping[str, int] = dict.fromkeys([*fresh, *running], 1)
        plan = batch.plan(Scheduled(dict(counts), new, cached, finished))
        sampled(plan)
        mirror |= tables(plan)
        seats = [entry.row for entry in plan.entries]
        assert len(set(seats)) == len(seats)
        assert all(0 <= row < rows for row in seats)
        for entry in plan.entries:
            pages, length = alive[entry.sequence.request_id]
            assert entry.start == length
            assert [mirror[0, entry.row, i] for i in range(len(pages))] == pages
            alive[entry.sequence.request_id][1] += 1
    assert batch.requests.keys() == alive.keys()


def test_nothing_of_vllm_is_imported_unasked() -> None:
    code = "import sys, fornax.llm; sys.exit(any('vllm' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
