"""The server as a process: drain, death of the engine, the address, the log."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.integration.llm.conftest import ROOT, SERVER_PROCESS

LONG = {"prompt": "hello world", "max_tokens": 500, "stream": True}


@pytest.mark.slow
def test_sigterm_lets_running_streams_finish_and_exits_0(serve):
    server = serve(_step_seconds=0.01)  # it runs for five seconds more when it is told to stop
    text = []

    def read():
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=LONG) as reply,
        ):
            text.extend(reply.iter_text())

    reader = threading.Thread(target=read)
    reader.start()
    while not text:
        time.sleep(0.01)
    assert server.stop() == 0
    reader.join()
    joined = "".join(text)
    assert joined.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in joined
    assert "error" not in joined
    assert "1 requests may finish" in server.log.read_text()


@pytest.mark.slow
def test_streams_that_outlast_the_drain_are_told(serve):
    server = serve(_step_seconds=0.05, shutdown_timeout=1)
    endless = {**LONG, "max_tokens": 4000}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=endless) as reply,
    ):
        pieces = reply.iter_text()
        next(pieces)
        server.popen.send_signal(signal.SIGTERM)
        joined = "".join(pieces)
    assert "the server is stopping" in joined
    assert joined.endswith("data: [DONE]\n\n")
    assert server.popen.wait(120) == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_when_the_engine_dies_the_process_says_so_and_exits_1(serve):
    server = serve(_step_seconds=0.01, _die_after=100, _grace=5.0)
    health = []

    def watch():
        with contextlib.suppress(httpx.TransportError):  # the process ended
            while True:
                health.append(httpx.get(f"{server.url}/health", timeout=120).status_code)

    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as reply:
        watching = threading.Thread(target=watch)
        watching.start()
        joined = "".join(reply.iter_text())
    assert '"code":"engine_dead"' in joined
    assert joined.endswith("data: [DONE]\n\n")
    watching.join()
    assert health[-1] == 503
    assert server.popen.wait(120) == 1
    assert "the engine died: RuntimeError: the device is gone" in server.log.read_text()


@pytest.mark.slow
def test_a_port_in_use_is_a_mistake_of_the_user_found_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = subprocess.run(
            [Path(sys.executable).with_name("fornax"), "serve", tmp_path, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert found.returncode == 2
    assert f"127.0.0.1:{port}: address already in use" in found.stderr


@pytest.mark.slow
def test_a_unix_socket_serves_too(tmp_path):
    path = tmp_path / "socket"
    log = tmp_path / "uds.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *SERVER_PROCESS,
                json.dumps({"uds": str(path), "header_timeout": 4.0, "_step_seconds": 0.12}),
            ],
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )
    try:
        while "Started server process" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        transport = httpx.HTTPTransport(uds=str(path), retries=5)
        with httpx.Client(transport=transport, base_url="http://server", timeout=120) as client:
            assert client.get("/health").status_code == 200
            longer = {"prompt": "hello", "max_tokens": 40}  # than a head may take
            assert client.post("/v1/completions", json=longer).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_access_log_goes_to_standard_output_as_json(serve):
    server = serve()
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "hello"}, headers={"x-request-id": "r1"})
    server.stop()
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]
    [entry] = map(json.loads, lines)
    assert (entry["id"], entry["status"], entry["completion_tokens"]) == ("r1", 200, 16)
