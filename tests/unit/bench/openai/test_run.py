"""`fornax bench serve` against a server that does as told: what is sent, measured, and survived."""

import json
import time
from collections.abc import Iterator

import pytest

from fornax.bench import BenchConfig, bench, summarise
from fornax.bench.load import arrival_times
from fornax.config import ConfigError, EngineError


def config(server, **settings) -> BenchConfig:
    small = {"num_prompts": 6, "random_input_len": 5, "random_output_len": 4}
    return BenchConfig(base_url=server.url, **{**small, **settings})


def test_times_and_counts_are_those_of_the_server(server):
    server.first_s, server.gap_s = 0.05, 0.02
    run = bench(config(server))
    assert run.model == "fake"
    assert len(run.outcomes) == 6
    for outcome in run.outcomes:
        assert outcome.error == ""
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (5, 4, "aaaa")
        assert outcome.first_token >= 0.05
        assert len(outcome.gaps) == 3
        assert outcome.latency >= 0.105  # a client that is late for the first sees shorter gaps
        assert outcome.latency == pytest.approx(outcome.first_token + sum(outcome.gaps))
    assert run.seconds >= max(outcome.latency for outcome in run.outcomes)


def test_prompts_are_tokens_that_the_server_knows(server):
    bench(config(server))
    for body in server.bodies:
        assert len(body["prompt"]) == 5
        assert all(token >= 100 for token in body["prompt"])
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6


def test_the_same_seed_sends_the_same(server):
    for seed in (3, 3, 4):
        bench(config(server, seed=seed, random_range_ratio=0.5, max_concurrency=1))
    first, again, other = server.bodies[:6], server.bodies[6:12], server.bodies[12:]
    assert first == again
    assert first != other


def test_no_more_requests_in_flight_than_allowed(server):
    server.gap_s, server.wait_for = 0.01, 3
    run = bench(config(server, num_prompts=12, max_concurrency=3))
    assert server.most_running == 3
    result = summarise(config(server, max_concurrency=3), run.outcomes, run.seconds)
    assert result["max_concurrent_requests"] == 3
    assert max(outcome.queued for outcome in run.outcomes) > 0.05


def test_connections_are_used_again(server):
    bench(config(server, num_prompts=12, max_concurrency=2))
    assert server.connections <= 3


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(server):
    server.close_after_answer = True
    run = bench(config(server, num_prompts=5, max_concurrency=1))
    assert [outcome.error for outcome in run.outcomes] == [""] * 5


def test_requests_are_sent_at_the_rate(server):
    start = time.perf_counter()
    run = bench(config(server, num_prompts=20, request_rate=50))
    assert time.perf_counter() - start >= 0.4
    for due, outcome in zip(arrival_times(20, rate=50), run.outcomes, strict=True):
        assert outcome.started - start >= due


def test_refusals_count_as_failed_with_what_the_server_said(server):
    server.fail_every = 3
    run = bench(config(server))
    failed = [outcome.error for outcome in run.outcomes if outcome.error]
    assert failed == ["status 503: no room"] * 2
    result = summarise(config(server), run.outcomes, run.seconds)
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["total_output_tokens"] == 16


def test_a_stream_that_breaks_off_fails_alone(server):
    server.break_every = 6
    run = bench(config(server, random_output_len=8))
    errors = [outcome.error for outcome in run.outcomes if outcome.error]
    assert len(errors) == 1
    assert "closed the connection" in errors[0]


def test_a_run_without_any_success_is_an_error(server):
    server.status = 400
    with pytest.raises(EngineError, match="none of 6 requests succeeded: status 400: no room"):
        bench(config(server))


def test_a_missing_server_is_named(unused_port):
    with pytest.raises(EngineError, match=f"no server answers at http://127.0.0.1:{unused_port}"):
        bench(BenchConfig(port=unused_port, num_prompts=1))


@pytest.fixture
def unused_port() -> Iterator[int]:
    import socket

    with socket.socket() as held:  # as long as the test runs, so that nobody else gets it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("knows_ready", [True, False])
def test_ready_check_waits(server, knows_ready):
    server.warm_after, server.knows_ready = 1, knows_ready
    bench(config(server, ready_check_timeout_sec=20))
    assert server.warm_after < 0


def test_ready_check_gives_up(server):
    server.warm_after = 1000
    with pytest.raises(EngineError, match=r"status 503 after 0\.1 s"):
        bench(config(server, ready_check_timeout_sec=0.1))


def test_warm_ups_are_not_counted(server):
    run = bench(config(server, num_warmups=2))
    assert (len(server.bodies), len(run.outcomes)) == (8, 6)


def test_settings_go_into_the_body(server):
    bench(
        config(
            server,
            num_prompts=1,
            ignore_eos=True,
            temperature=0.5,
            top_k=3,
            logprobs=2,
            extra_body='{"priority": 7}',
            header=("x-a=b=c",),
            served_model_name="other",
        )
    )
    (body,) = server.bodies
    wanted = {"ignore_eos": True, "temperature": 0.5, "top_k": 3, "logprobs": 2, "priority": 7}
    assert wanted.items() <= body.items()
    assert body["model"] == "other"
    assert "top_p" not in body
    assert server.headers[0]["x-a"] == "b=c"


def test_the_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    bench(config(server, num_prompts=1))
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_request_ids_are_numbered(server):
    bench(config(server, num_prompts=3, max_concurrency=1, request_id_prefix="p-"))
    assert [headers["x-request-id"] for headers in server.headers] == ["p-0", "p-1", "p-2"]


def test_two_runs_share_no_request_id(server):
    for _ in range(2):
        bench(config(server, num_prompts=2))
    assert len({headers["x-request-id"] for headers in server.headers}) == 4


def test_chat_sends_messages_and_counts_no_token_for_the_role(server):
    run = bench(config(server, num_prompts=1, backend="openai-chat"))
    (body,) = server.bodies
    ((message,),) = (body["messages"],)
    assert message["role"] == "user"
    assert len(message["content"].split()) == 5
    assert body["max_completion_tokens"] == 4
    assert len(run.outcomes[0].gaps) == 3


def test_adapters_take_turns(server):
    adapters = ("a", "b")
    bench(config(server, lora_modules=adapters, lora_assignment="round-robin", max_concurrency=1))
    assert [body["model"] for body in server.bodies] == ["a", "b"] * 3


def test_a_body_that_is_no_object_is_refused(server):
    with pytest.raises(ConfigError, match="must be a JSON object"):
        bench(config(server, extra_body="[1]"))


def test_default_lengths_fit_the_context_of_the_model(server):
    server.context = 100
    bench(BenchConfig(base_url=server.url, num_prompts=1))
    (body,) = server.bodies
    assert len(body["prompt"]) + body["max_tokens"] == 100


def test_a_recorded_trace_is_replayed_at_its_times(server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 600000 + 150 * n, "input_length": 20, "output_length": n + 1, "hash_ids": [9]}
        for n in range(3)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    start = time.perf_counter()
    run = bench(
        config(
            server,
            dataset_name="timed_trace",
            dataset_path=trace,
            timed_trace_sec_multiplier=0.001,
        )
    )
    assert [outcome.output_tokens for outcome in run.outcomes] == [1, 2, 3]
    sent = [outcome.started - start for outcome in run.outcomes]
    assert sent[1] >= 0.15
    assert sent[2] >= 0.3
    assert sent[0] < 300  # their times are from the first one's
    heads = {tuple(body["prompt"][:16]) for body in server.bodies}
    tails = {tuple(body["prompt"][16:]) for body in server.bodies}
    assert (len(heads), len(tails)) == (1, 3)


def test_256_streams_at_once(server):
    server.gap_s = 0.005
    run = bench(config(server, num_prompts=256, random_output_len=16))
    assert all(outcome.error == "" for outcome in run.outcomes)
    assert sum(outcome.output_tokens for outcome in run.outcomes) == 256 * 16
