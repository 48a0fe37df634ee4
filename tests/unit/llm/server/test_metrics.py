"""`/metrics`: vLLM's names and labels, and what is counted under them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fornax.llm.server import Metrics
from fornax.llm.stats import RequestStats, StepStats

# The names on vLLM's own dashboards, as they are exposed.
NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:iteration_tokens_total_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
]


def samples(text):
    """Values by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Shown:
    """What metrics show."""

    def __init__(self, metrics):
        text, kind = metrics.exposition()
        assert kind.startswith("text/plain")
        self._samples = samples(text.decode())

    def __call__(self, name, **labels):
        own = {} if name.startswith("http") else {"model_name": "m", "engine": "0"}
        return self._samples[name, tuple(sorted({**own, **labels}.items()))]

    def names(self):
        return {name for name, _ in self._samples}


@pytest.fixture
def metrics():
    return Metrics("m", max_model_len=4096, max_loras=2)


def test_every_name_is_there_before_the_first_request(metrics):
    assert set(NAMES) <= Shown(metrics).names()


def test_a_step_is_counted(metrics):
    step = StepStats(
        seconds=0.5,
        running=3,
        waiting=2,
        cache_usage=0.25,
        bucket=64,
        tokens=50,
        prompt_tokens=40,
        generation_tokens=10,
        prefix_queries=80,
        prefix_hits=30,
        preemptions=1,
        drafts=2,
        draft_tokens=8,
        accepted_tokens=5,
        accepted_per_position=[3, 2],
        running_loras=("a", "b"),
        compiled=("step_64",),
    )
    metrics.step(step)
    metrics.step(step)
    shown = Shown(metrics)
    assert shown("vllm:num_requests_running") == 3
    assert shown("vllm:num_requests_waiting") == 2
    assert shown("vllm:kv_cache_usage_perc") == 0.25
    assert shown("vllm:prefix_cache_queries_total") == 160
    assert shown("vllm:prefix_cache_hits_total") == 60
    assert shown("vllm:num_preemptions_total") == 2
    assert shown("vllm:generation_tokens_total") == 20
    assert shown("vllm:prompt_tokens_by_source_total", source="local_compute") == 80
    assert shown("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 4
    assert shown("fornax:bucket_padding_tokens_total", bucket="64") == 28
    assert shown("fornax:bucket_tokens_total", bucket="64") == 100
    assert shown("fornax:step_seconds_total", bucket="64") == 1.0
    assert shown("fornax:compilations_after_ready_total", program="step_64") == 2
    loras = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    assert shown("vllm:lora_requests_info", **loras) > 0


def test_the_steps_of_one_call_are_counted_each(metrics):
    metrics.step(StepStats(seconds=0.5, steps=3, bucket=8, tokens=5, generation_tokens=15))
    shown = Shown(metrics)
    assert shown("fornax:steps_total", bucket="8") == 3
    assert shown("fornax:bucket_tokens_total", bucket="8") == 15
    assert shown("fornax:bucket_padding_tokens_total", bucket="8") == 9
    assert shown("fornax:step_seconds_total", bucket="8") == 0.5
    assert shown("vllm:iteration_tokens_total_count") == 3
    assert shown("vllm:iteration_tokens_total_sum") == 15


def test_a_finished_request_is_counted(metrics):
    stats = RequestStats(
        request_id="r",
        arrival=10.0,
        scheduled=10.5,
        first_token=11.0,
        finished=13.0,
        prompt_tokens=100,
        cached_tokens=64,
        generation_tokens=41,
        finish_reasons=["stop"],
        max_tokens=200,
    )
    metrics.finished(stats)
    shown = Shown(metrics)
    assert shown("vllm:request_success_total", finished_reason="stop") == 1
    assert shown("vllm:prompt_tokens_total") == 100
    assert shown("vllm:prompt_tokens_cached_total") == 64
    assert shown("vllm:request_queue_time_seconds_sum") == 0.5
    assert shown("vllm:request_prefill_time_seconds_sum") == 0.5
    assert shown("vllm:request_decode_time_seconds_sum") == 2.0
    assert shown("vllm:request_inference_time_seconds_sum") == 2.5
    assert shown("vllm:e2e_request_latency_seconds_sum") == 3.0
    assert shown("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(2.0 / 40)
    assert shown("vllm:request_prefill_kv_computed_tokens_sum") == 36


def test_a_request_that_never_ran_counts_as_waiting_time_only(metrics):
    stats = RequestStats(request_id="r", arrival=1.0, finished=3.0, finish_reasons=["abort"])
    metrics.finished(stats)
    shown = Shown(metrics)
    assert shown("vllm:request_queue_time_seconds_sum") == 2.0
    assert shown("vllm:request_inference_time_seconds_count") == 0
    assert shown("vllm:request_success_total", finished_reason="abort") == 1


def test_http_requests_are_counted_by_route_and_not_by_path(app):
    app.get("/v1/models/m")
    app.get("/v1/models/other")
    app.get("/made/up/one")
    app.get("/made/up/two")
    app.request("BREW", "/v1/models")
    shown = Shown(app.metrics)
    route = {"handler": "/v1/models/{name:path}", "method": "GET"}
    assert shown("http_requests_total", status="2xx", **route) == 1
    assert shown("http_requests_total", status="4xx", **route) == 1
    assert shown("http_requests_total", status="4xx", handler="none", method="GET") == 2
    assert shown("http_requests_total", status="4xx", handler="/v1/models", method="other") == 1
    assert shown("http_request_duration_seconds_count", **route) == 2


def test_an_idle_engine_shows_no_load_whatever_its_last_step_was(app):
    app.metrics.step(StepStats(running=2, waiting=1, cache_usage=0.5, bucket=8, tokens=8))
    text = app.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0' in text


def test_sleep_is_shown(make_app):
    app = make_app(enable_dev_endpoints=True)
    assert app.post("/sleep?level=1").status_code == 200
    assert app.get("/is_sleeping").json() == {"is_sleeping": True}
    reply = app.post("/v1/completions", {"prompt": "hello"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "sleeping")
    asleep = {"sleep_state": "weights_offloaded"}
    assert Shown(app.metrics)("vllm:engine_sleep_state", **asleep) == 1
    app.post("/wake_up")
    assert Shown(app.metrics)("vllm:engine_sleep_state", **asleep) == 0
    assert app.post("/v1/completions", {"prompt": "hello"}).status_code == 200


def test_lengths_are_counted_in_bounds_up_to_the_longest_prompt():
    metrics = Metrics("m", max_model_len=60)
    for length in (1, 7, 60):
        stats = RequestStats("r", arrival=1.0, finished=2.0, prompt_tokens=length)
        metrics.finished(stats)
    shown = Shown(metrics)
    name = "vllm:request_prompt_tokens_bucket"
    counts = {bound: shown(name, le=bound) for bound in ("1.0", "5.0", "10.0", "50.0", "+Inf")}
    assert counts == {"1.0": 1, "5.0": 1, "10.0": 2, "50.0": 2, "+Inf": 3}
    assert (name, (("engine", "0"), ("le", "100.0"), ("model_name", "m"))) not in shown._samples


def test_a_scrape_has_no_names_that_vllm_has_not(metrics):
    assert not [name for name in Shown(metrics).names() if name.endswith("_created")]
