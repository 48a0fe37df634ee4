"""Paged attention's kernel for Hopper, interpreted, against attention written out in float64.

Legend: H head width, P pages, S slots of a page, K key heads.
"""

from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.mosaic import interpreted_hopper
from tests.numerics.kernels.test_paged_attention import make_step, run

from fornax.kernels._paged_attention import gpu

MIXED = [(9, 1), (150, 1), (70, 37), (6, 6)]
"""Contexts of one and several blocks of keys, and prompts of several tiles, one with a past."""
SINKS = np.array([0.5, -1.0, 2.0, 30.0])
CASES: dict[str, dict[str, Any]] = {
    "mixed": {"rows": MIXED, "h": 64},
    "joined": {"rows": [(5, 1), (64, 1), (300, 1)], "h": 128},
    "window and sinks": {"rows": [(9, 1), (300, 3)], "h": 64, "window": 100, "sinks_N": SINKS},
    "softcap": {"rows": [(9, 1), (200, 3)], "h": 256, "softcap": 2.0},
    "no tokens": {"rows": [], "h": 64, "padding": 2},
    "group of 7": {"rows": MIXED, "h": 64, "n": 7, "k": 1},
    "whole tile": {"rows": [(130, 2)], "h": 64, "n": 64, "k": 1},
    "no group": {"rows": [(65, 1), (70, 5)], "h": 64, "n": 2, "k": 2},
    "small page": {"rows": [(9, 1), (200, 3)], "h": 64, "page": 8},
    "large page": {"rows": [(9, 1), (300, 1)], "h": 64, "page": 128},
    "window within a block": {"rows": MIXED, "h": 128, "window": 7, "softcap": 2.0},
    "more blocks than buffers": {"rows": [(900, 1)], "h": 64, "unused_rows": 0, "padding": 0},
}
BRIEF = ("mixed", "joined", "window and sinks", "softcap")


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of short contexts."""
    monkeypatch.setattr(gpu, "_SHORTEST_PART", 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in BRIEF else pytest.mark.exhaustive) for c in CASES]
)
def test_agrees_with_float64(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.startswith("more"):
        monkeypatch.setattr(gpu, "_SHORTEST_PART", 1000)
    dtype = jnp.float16 if case == "no group" else jnp.bfloat16
    step = make_step(**{"page": 16, **CASES[case]}, dtype=dtype, cache_dtype=dtype)
    with interpreted_hopper():
        found = run(step, "pallas_gpu", dtype, dtype, joined=case == "joined")
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-2, atol=2e-2)
    error = np.linalg.norm(found - step.expected_TNH)
    assert error <= 4e-3 * np.linalg.norm(step.expected_TNH)


@pytest.mark.slow
def test_reads_each_page_once() -> None:
    S, K, H = 16, 2, 64
    step = make_step([(5, 1), (150, 1)], h=H, k=K, page=S, dtype=jnp.bfloat16)
    with interpreted_hopper() as copies:
        run(step, "pallas_gpu", jnp.bfloat16, jnp.bfloat16)
    P = step.kv_LPSCH.shape[1]
    pages = [(P + page) * S for page in (step.page_table_RW[0, 0], *step.page_table_RW[1, :10])]
    [_, slices] = sorted(copies.values(), key=len)  # of queries and of the cache
    assert {rows.stop - rows.start for rows, _ in slices} == {S}
    found = Counter((rows.start, columns.start) for rows, columns in slices)
    assert set(found) == {(page, part * H) for page in pages for part in range(2 * K)}
    # Blocks of keys that are not full read their row's last page again.
    assert {page for (page, _), times in found.items() if times > 1} <= {pages[0], pages[-1]}
