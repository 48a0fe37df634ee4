"""Page tables stay on the device: steps bring changes, whose number the tables' width is not in."""

import numpy as np
import pytest
from tests.integration.llm.helpers import SIZES, engine_of, prompts_of
from tests.unit.models.conftest import decoder_of

from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.engine import Engine
from fornax.llm.programs import CHANGES
from fornax.llm.request import Request
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.scheduler_output import PageUpdate, SchedulerOutput


def _engine(**options: int) -> Engine:
    parts = build_engine(decoder_of("windowed"), EngineConfig(**{**SIZES, **options}))
    prompts = prompts_of(21, 30, 9, 21, 30)
    prompts[3], prompts[4] = prompts[0], prompts[1]  # what the first two leave in the cache
    for index, prompt in enumerate(prompts):
        params = SamplingParams(seed=index, max_tokens=12 + index, ignore_eos=True, n=2)
        request: Request = parts.input_processor.request(prompt, params, request_id=str(index))
        parts.engine.add(request)
    return parts.engine


@pytest.mark.slow
def test_the_tables_are_the_block_managers_whatever_happens_to_sequences() -> None:
    """Windows, shared pages, forks, and so few pages that sequences are pushed out."""
    engine = _engine(num_gpu_blocks_override=24)
    compared = 0
    while engine.has_work:
        engine.step()
        tables = [np.asarray(table) for table in engine.runner.executor.tables]
        for sequence in engine.scheduler.running:
            for table, pages in zip(tables, sequence.pages, strict=True):
                np.testing.assert_array_equal(table[sequence.row, : len(pages)], pages)
                compared += len(pages)
    assert compared > 500


@pytest.mark.slow
def test_more_changes_than_a_step_carries_go_ahead_of_it() -> None:
    runner = engine_of("windowed", block_size=1)._parts.engine.runner
    width = runner.limits.table_width
    rng = np.random.default_rng(0)
    expected = [np.asarray(table).copy() for table in runner.executor.tables]
    plan = SchedulerOutput()
    for _ in range(3 * CHANGES):
        change = PageUpdate(
            group=int(rng.integers(len(expected))),
            row=int(rng.integers(4)),
            index=int(rng.integers(width)),
            page=int(rng.integers(50)),
        )
        plan.updates.append(change)
        expected[change.group][change.row, change.index] = change.page
    left = runner._changes(plan, 7)
    for table, change_3U, wanted in zip(runner.executor.tables, left, expected, strict=True):
        found = np.asarray(table).copy()
        found[change_3U[0], change_3U[1]] = change_3U[2]
        assert change_3U.shape[1] == 7
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_step_brings_no_more_for_longer_sequences() -> None:
    short, long = (
        engine_of("biased", max_model_len=length)._parts.engine.runner for length in (16, 64)
    )
    for tokens, layout in short._sizes.layouts.items():
        assert long._sizes.layouts[tokens].size == layout.size
