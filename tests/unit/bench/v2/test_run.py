"""The load generator: what it sends, what it counts, and what it says of a server that fails."""

import json

import numpy as np
import pytest
from tests.unit.bench.v2.fake import FakeV2, running

from fornax.bench import HostBenchConfig, bench_host, figures
from fornax.cli.main import main as fornax
from fornax.config import ConfigError, ServingError


@pytest.fixture
def server():
    app = FakeV2()
    with running(app) as address:
        yield app, address


def _config(address, **changes):
    fields = {"model": "ranker", "url": address, "seconds": 1.0, "warmup_seconds": 0.05}
    return HostBenchConfig(**{**fields, "processes": 1, "concurrency": (3,), **changes})


def test_every_answer_is_counted_and_the_servers_time_divided(server):
    app, address = server
    (measured,) = bench_host(_config(address, rows=3, distinct=2))
    found = figures(measured)
    assert 0 < found["requests"] <= app.infers
    assert found["failed"] == 0
    assert found["rows_per_second"] == pytest.approx(3 * found["requests_per_second"])
    assert 0 < found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"] <= found["max_ms"]
    server_us = found["server"]
    assert server_us["queue_us"] == server_us["compute_infer_us"] == 4.0
    assert server_us["rows_per_batch"] == 3.0
    assert 16.0 + server_us["outside_us"] == pytest.approx(1e3 * found["mean_ms"])
    assert len(app.bodies) == 2


def test_requests_are_v2_with_binary_tensors(server):
    app, address = server
    list(bench_host(_config(address, rows=2, shape=("ids:2,5",), distinct=1)))
    (body,) = app.bodies
    head = next(h for h in app.heads if b"inference-header-content-length" in h)
    size = int(head[b"inference-header-content-length"])
    tensors = {each["name"]: each for each in json.loads(body[:size])["inputs"]}
    assert tensors["ids"]["shape"] == [2, 5]
    assert tensors["text"]["shape"] == [2]
    assert tensors["weight"]["datatype"] == "BF16"
    assert sum(t["parameters"]["binary_data_size"] for t in tensors.values()) == len(body) - size
    ids = np.frombuffer(body, np.int32, 10, size)
    assert 0 <= ids.min() <= ids.max() < 100


def test_failures_are_counted_by_reason_and_the_load_goes_on(server, caplog):
    app, address = server
    app.refuse_every, app.hang_up_every, app.hang_every = 2, 3, 11
    (measured,) = bench_host(_config(address, timeout=0.2))
    found = figures(measured)
    assert found["errors"]["HTTP 429"] >= 1
    assert found["errors"]["HTTP 500"] >= 1
    assert found["errors"]["timeout"] >= 1
    assert measured.counts.examples["HTTP 429"] == "the queue is full"
    assert found["failed"] == sum(found["errors"].values())


def test_several_processes_share_the_clients(server):
    app, address = server
    (measured,) = bench_host(_config(address, processes=2, concurrency=(4,)))
    assert measured.processes == 2
    assert 0 < len(measured.counts.latencies) <= app.infers


def test_the_command_prints_a_row_a_concurrency_and_writes_json(server, capsys, tmp_path):
    _, address = server
    path = tmp_path / "bench.json"
    words = ["bench", "host", "--model", "ranker", "--url", address, "--seconds", "0.2"]
    words += ["--warmup-seconds", "0", "--concurrency", "1", "2", "--json", str(path)]
    assert fornax(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["clients", "requests/s"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    written = json.loads(path.read_text())
    assert [result["concurrency"] for result in written["results"]] == [1, 2]


def test_a_file_of_inputs_is_sent_in_the_models_dtypes(server, tmp_path):
    app, address = server
    bodies = [
        {
            "inputs": [
                {"name": "ids", "datatype": "INT64", "shape": [1, 2], "data": [[7, number]]},
                {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["né"]},
                {"name": "weight", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]},
            ]
        }
        for number in (8, 9)
    ]
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(bodies))
    list(bench_host(_config(address, input=path)))
    assert len(app.bodies) == 2
    for body in app.bodies:
        assert np.frombuffer(body[-4 - 7 - 8 :][:8], np.int32)[0] == 7
        assert b"n\xc3\xa9" in body


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "no such model"),
        ({"shape": ("idx:1,2",)}, "'idx' is not an input; the model has ids, text, weight"),
        ({"shape": ("weight:2,3",)}, "does not fit weight"),
    ],
)
def test_what_does_not_fit_is_said(server, changes, message):
    _, address = server
    with pytest.raises((ConfigError, ServingError), match=message):
        list(bench_host(_config(address, **changes)))


def test_no_server_is_one_paragraph():
    with pytest.raises(ServingError, match=r"no server answers at 127\.0\.0\.1:9"):
        list(bench_host(_config("127.0.0.1:9")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": (0,)}, "concurrency"),
        ({"url": "nowhere"}, "write host:port"),
        ({"shape": ("ids",)}, "write NAME:8,128"),
        ({"seconds": 0.0}, "leaves no time"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        _config("127.0.0.1:9", **changes)
