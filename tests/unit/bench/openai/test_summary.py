"""The figures of a run, against figures worked out by hand."""

import pytest

from fornax.bench import BenchConfig, Outcome, summarise
from fornax.bench.openai.report import goodput
from fornax.config import ConfigError


def outcome(started: float, first: float, *gaps: float, **more) -> Outcome:
    settings = {"prompt_tokens": 10, "output_tokens": len(gaps) + 1, **more}
    return Outcome(
        started=started, first_token=first, gaps=list(gaps), latency=first + sum(gaps), **settings
    )


RUN = [
    outcome(0.0, 0.1, 0.1, 0.3),
    outcome(0.2, 0.2, 0.1),
    outcome(2.0, 0.4),
    Outcome(started=0.0, error="status 503"),
]


def test_counts_and_rates():
    result = summarise(BenchConfig(), RUN, 4.0)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 6)
    assert result["request_throughput"] == 0.75
    assert result["output_throughput"] == 1.5
    assert result["total_token_throughput"] == 9.0
    assert result["request_goodput"] is None
    assert result["max_output_tokens_per_s"] == 5.0
    assert result["max_concurrent_requests"] == 2


def test_a_price_says_what_tokens_cost():
    """Four seconds of two chips at 9 an hour are 0.02."""
    result = summarise(BenchConfig(price=9.0, chips=2), RUN, 4.0)
    assert result["cost_usd"] == pytest.approx(0.02)
    assert result["cost_per_million_output_tokens_usd"] == pytest.approx(0.02 / 6 * 1e6)
    assert result["cost_per_million_tokens_usd"] == pytest.approx(0.02 / 36 * 1e6)
    assert not any("cost" in name for name in summarise(BenchConfig(), RUN, 4.0))
    failed = summarise(BenchConfig(price=9.0), RUN[-1:], 4.0)
    assert failed["cost_per_million_output_tokens_usd"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"price": -1.0}, "price=-1.0 is not a price"),
        ({"price": float("nan")}, "price=nan is not a price"),
        ({"price": 1.0, "chips": 0}, "chips=0 must be at least 1"),
        ({"chips": 8}, "chips=8 is for price, which is not given; add --price"),
    ],
)
def test_what_is_no_price_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**options)


def test_latencies():
    config = BenchConfig(percentile_metrics="ttft,tpot,itl,e2el", metric_percentiles="50,100")
    result = summarise(config, RUN, 4.0)
    assert result["mean_ttft_ms"] == pytest.approx(700 / 3)
    assert result["p100_ttft_ms"] == pytest.approx(400)
    assert result["mean_tpot_ms"] == pytest.approx(150)
    assert result["median_itl_ms"] == pytest.approx(100)
    assert result["p50_e2el_ms"] == pytest.approx(400)
    assert "client_queue_time" not in " ".join(result)


def test_one_token_has_no_time_per_token():
    assert summarise(BenchConfig(), [RUN[2]], 1.0)["mean_tpot_ms"] == 0.0


def test_queue_times_are_reported_where_requests_could_wait():
    config = BenchConfig(
        max_concurrency=1,
        request_rate=5,
        percentile_metrics="client_queue_time,e2el_including_client_queue",
    )
    result = summarise(config, [outcome(0.0, 0.25, queued=0.5)], 1.0)
    assert result["mean_client_queue_time_ms"] == pytest.approx(500)
    assert result["p99_e2el_including_client_queue_ms"] == pytest.approx(750)


@pytest.mark.parametrize(
    ("objectives", "count"),
    [
        ({"ttft": 0.2}, 2),
        ({"tpot": 0.15}, 2),
        ({"ttft": 0.15, "tpot": 0.3}, 1),
        ({"e2el": 0.45}, 2),
        ({"ttft": 0.0}, 0),
    ],
)
def test_goodput_counts_requests_within_every_objective(objectives, count):
    assert goodput(RUN[:3], objectives) == count


def test_goodput_is_a_rate():
    config = BenchConfig(goodput=("ttft:200", "tpot:250"))
    assert summarise(config, RUN, 4.0)["request_goodput"] == 0.5
