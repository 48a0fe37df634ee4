"""`vllm serve DIR` as anyone starts it: OpenAI's client gets Fornax's tokens."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from tests.vllm.conftest import SIZES
from tests.vllm.models import make

import fornax.llm

SECONDS = 240
"""To start, at most."""

PROMPTS = ["the quick brown fox", "days. the lazy", "123 jumps over"]


@dataclass(frozen=True)
class Server:
    """A running `vllm serve`."""

    process: subprocess.Popen
    client: openai.OpenAI
    folder: Path
    log: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make("llama", tmp_path_factory.mktemp("model"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = [Path(sys.executable).with_name("vllm"), "serve", folder, f"--port={port}", *flags]
    environment = dict(os.environ)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    log = folder.parent / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            yield Server(process, client, folder, log)
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen, address: str, log: Path) -> None:
    for _ in range(SECONDS):
        try:
            with urllib.request.urlopen(address):
                return
        except OSError:
            assert process.poll() is None, log.read_text()[-5000:]
            time.sleep(1)
    raise AssertionError(f"not ready after {SECONDS} s: {log.read_text()[-5000:]}")


def test_completions_are_those_of_the_own_engine(server: Server) -> None:
    ours = fornax.llm.LLM(server.folder, **SIZES)
    params = fornax.llm.SamplingParams(temperature=0.0, max_tokens=16)
    expected = [output.outputs[0].token_ids for output in ours.generate(PROMPTS, params)]
    asked = {"model": str(server.folder), "temperature": 0, "max_tokens": 16}
    create = server.client.completions.create
    found = create(prompt=PROMPTS, extra_body={"return_token_ids": True}, **asked)
    assert [choice.token_ids for choice in found.choices] == expected
    parts = create(prompt=PROMPTS[0], stream=True, **asked)
    assert "".join(part.choices[0].text for part in parts) == found.choices[0].text


def test_what_fornax_refuses_is_a_bad_request(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="extra_args"):
        server.client.completions.create(
            model=str(server.folder), prompt="the", extra_body={"vllm_xargs": {"a": 1}}
        )


def test_sigterm_ends_it(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()[-5000:]
    assert "Application shutdown complete" in server.log.read_text()
