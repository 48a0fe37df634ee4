"""`fornax host` as it is run: signals, exit codes, rollout and rollback, what it prints."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export
from fornax.cli.main import main as fornax
from fornax.config import environment
from fornax.export import Spec

pytestmark = pytest.mark.slow

BODY = {
    "id": "first",
    "inputs": [
        {"name": "ids", "datatype": "INT32", "shape": [1, 3], "data": [3, 4, 5]},
        {"name": "weight", "datatype": "FP32", "shape": [1], "data": [1.0]},
    ],
}


def _score(client):
    answer = client.post("/v2/models/ranker/infer", json=BODY).json()
    return answer["model_version"], answer["outputs"][0]["data"][0]


def _status(capsys, url):
    code = fornax(["host", "status", "--url", url, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_version_is_rolled_out_watched_and_rolled_back(start, repository, bundles, capsys):
    server = start(
        repository, "--poll-seconds", "0.1", "--access-log", "all", "--log-format", "json"
    )
    url = server.address("http")
    with httpx.Client(base_url=f"http://{url}", timeout=120) as client:
        assert client.get("/v2/health/ready").status_code == 200
        version, first = _score(client)
        assert version == "1"

        shutil.copytree(bundles / "ranker" / "2", repository / "ranker" / "2")
        server.wait_for("ranker 2: ready")
        version, second = _score(client)
        assert version == "2"
        assert second == pytest.approx(2 * first, rel=1e-5)

        assert fornax(["host", "rollback", "ranker", "--url", url]) == 0
        assert "version 1 serves in place of 2" in capsys.readouterr().out
        assert _score(client) == ("1", first)
        assert fornax(["host", "release", "ranker", "--url", url]) == 0
        server.wait_for(r"ranker 2: ready(.|\n)*ranker 2: ready")
        assert _score(client) == ("2", second)

        metrics = client.get("/metrics").text
        assert 'nv_inference_request_success{model="ranker",version="2"}' in metrics
        assert "fornax_compilations_after_ready_total 0" in metrics
    for protocol in ("http", "grpc"):
        words = ["--protocol", protocol, "--url", server.address(protocol), "--seconds", "0.3"]
        words += ["--concurrency", "3", "--warmup-seconds", "0", "--shape", "ids:1,5"]
        assert fornax(["bench", "host", "--model", "ranker", *words]) == 0
    capsys.readouterr()
    code, found = _status(capsys, url)
    assert code == 0
    states = {(each["name"], each["version"]): each["state"] for each in found["models"]}
    assert states["ranker", "2"] == "READY"
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    answered = [line for line in lines if line.get("id") == "first"]
    assert [line["version"] for line in answered] == ["1", "2", "1", "2"]
    assert all(line["code"] == "OK" and line["rows"] == 1 for line in answered)


@contextlib.contextmanager
def _asked(server):
    """A client, and an answer that waits for others to share its batch with."""
    running = 'fornax_requests_running{model="ranker",version="1",function="predict"} 1'
    with (
        httpx.Client(base_url=f"http://{server.address('http')}", timeout=120) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(client.post, "/v2/models/ranker/infer", json=BODY)
        while running not in client.get("/metrics").text:
            assert not answer.done()
            time.sleep(0.01)
        yield client, answer


def test_sigterm_answers_what_was_accepted_and_a_second_signal_quits(start, repository):
    settings = repository / "ranker" / "serving.yaml"
    settings.write_text("batching:\n  max_delay_ms: 5000\n")
    drained = start(repository, "--drain-delay-seconds", "4", "--poll-seconds", "1000")
    settings.write_text("batching:\n  max_delay_ms: 600000\n")
    quitted = start(repository)
    with _asked(drained) as (client, answer):
        drained.popen.send_signal(signal.SIGTERM)
        drained.wait_for("stopping")
        assert client.get("/v2/health/ready").status_code != 200
        assert client.get("/v2/health/live").status_code == 200
        assert answer.result().status_code == 200
        assert answer.result().json()["model_version"] == "1"
    assert drained.popen.wait(120) == 0
    assert drained.log.read_text().rstrip().endswith("stopped")

    with _asked(quitted) as (_, answer):
        quitted.popen.send_signal(signal.SIGINT)
        quitted.wait_for("stopping")
        assert quitted.stop(signal.SIGINT) == 1
        # There is little time to compute it, or to refuse it.
        assert answer.exception() is not None or answer.result().status_code in (200, 503)
    assert "stopped at once" in quitted.log.read_text()


def _command(*words):
    return subprocess.run(
        [sys.executable, "-m", "fornax", "host", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment.for_child({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": None}),
    )


def test_an_address_that_is_taken_is_one_paragraph_and_exit_code_2(repository):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {}

        def run(name, *words):
            found[name] = _command(str(repository), *words)

        threads = [
            threading.Thread(target=run, args=("http", "--http", str(port), "--grpc", "0")),
            threading.Thread(target=run, args=("grpc", "--http", "0", "--grpc", str(port))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, done in found.items():
        assert done.returncode == 2, done.stderr
        assert f"--{name} 127.0.0.1:{port} cannot be listened on" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_model_that_fails_takes_no_other_down(start, repository, bundles, capsys):
    shutil.copytree(bundles / "ranker" / "1", repository / "broken" / "1")
    manifest = repository / "broken" / "1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0', 1))
    strict = start(repository)
    assert "not ready after" in strict.log.read_text()
    code, found = _status(capsys, strict.address("http"))
    assert code == 1
    reasons = {each["name"]: each["reason"] for each in found["models"]}
    assert reasons["ranker"] == ""
    assert reasons["broken"]
    began = time.monotonic()
    assert fornax(["host", "status", "--url", strict.address("http"), "--wait", "600"]) == 1
    assert time.monotonic() - began < 300
    assert "not ready: broken is not served" in capsys.readouterr().out
    with httpx.Client(base_url=f"http://{strict.address('http')}", timeout=120) as client:
        assert client.get("/v2/models/ranker/ready").status_code == 200
        assert _score(client)[0] == "1"
    assert strict.stop() == 0
    done = _command(str(repository), "--http", "0", "--grpc", "none", "--exit-on-error")
    assert done.returncode == 1
    assert "broken 1: unavailable" in done.stderr


def _steps(params, steps):
    def turn(_, x):
        return jnp.sin(x + params["w"])

    return {"y": jax.lax.fori_loop(0, jnp.max(steps), turn, jnp.zeros(steps.shape))}


def test_a_program_that_is_sometimes_slow_does_not_stop_health_checks(start, tmp_path):
    """It is fast when the server times it; from its first slow answer on the loop leaves it."""
    root = tmp_path / "models"
    export.save(
        root / "steps" / "1",
        {"predict": _steps},
        {"w": np.ones((), np.float32)},
        inputs={"predict": {"steps": Spec(("b",), "int32", low=0)}},
        buckets={"b": [1]},
        platforms=("cpu",),
    )
    server = start(root)
    url = f"http://{server.address('http')}"

    def ask(steps: int) -> float:
        tensor = {"name": "steps", "datatype": "INT32", "shape": [1], "data": [steps]}
        began = time.monotonic()
        answer = httpx.post(f"{url}/v2/models/steps/infer", json={"inputs": [tensor]}, timeout=120)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began

    for _ in range(5):
        ask(1)
    steps = 100_000
    while min(ask(steps), ask(steps)) < 1.0:
        steps *= 2
    checked, answered = threading.Event(), []

    def ask_on() -> None:
        while not checked.is_set():
            answered.append(ask(steps))

    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=url, timeout=120) as client:
        slow = threads.submit(ask_on)
        try:
            for _ in range(100):
                assert client.get("/v2/health/live").status_code == 200
                time.sleep(0.01)
            meanwhile = len(answered)
        finally:
            checked.set()
        slow.result()
    assert meanwhile < 12  # between two answers of a server that was stopped by each come a few


@pytest.mark.parametrize("words", [("--http", "0.0.0.0:0"), ("--grpc", "[::]:0")])
def test_an_address_for_all_needs_a_token(repository, words, capsys):
    assert fornax(["host", str(repository), *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "anybody there may load, unload and roll back models" in said
    assert "--token-file" in said
