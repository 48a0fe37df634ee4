"""What an LLM server writes of itself, from what its engine told."""

import pytest

from fornax.llm.server.metrics import Metrics
from fornax.llm.stats import RequestStats, StepStats


def test_a_row_is_of_the_time_since_the_row_before() -> None:
    metrics = Metrics("m", max_model_len=1024)
    metrics.step(StepStats(running=2, waiting=1, cache_usage=0.25, bucket=16, tokens=12,
                           prompt_tokens=10, generation_tokens=2, prefix_queries=10,
                           prefix_hits=4))  # fmt: skip
    first = metrics.row(2.0)
    assert (first["running"], first["waiting"], first["cache_usage"]) == (2, 1, 0.25)
    assert first["generation_tokens_per_second"] == 1.0
    assert (first["batch_tokens"], first["batch_fill"]) == (12, 0.75)
    assert first["prefix_hit_rate"] == 0.4
    assert first["request_seconds"] is None

    for arrival, end in ((10.0, 11.0), (10.0, 13.0)):
        metrics.first_token(0.5)
        metrics.finished(
            RequestStats("r", arrival, arrival + 0.25, arrival + 0.5, end, prompt_tokens=8)
        )
    second = metrics.row(4.0)
    assert second["requests"] == 2
    assert second["requests_per_second"] == 0.5
    assert second["request_seconds"] == pytest.approx(2.0)
    assert second["queue_seconds"] == pytest.approx(0.25)
    assert second["first_token_seconds"] == pytest.approx(0.5)
    assert second["prompt_tokens_per_second"] == 4.0
    assert second["batch_fill"] is None
