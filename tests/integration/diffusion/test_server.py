"""`fornax diffusion serve` as a process: ready, cancelled clients, draining."""

import base64
import io
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import openai
import pytest
from PIL import Image
from tests.integration.llm.conftest import Process

pytestmark = pytest.mark.slow


class Server(Process):
    command: ClassVar = [sys.executable, "-m", "tests.integration.diffusion.image_server"]
    start_seconds: ClassVar = 240


@pytest.fixture
def server(tmp_path):
    made = Server({"max_steps": 1000, "run_dir": str(tmp_path / "run")}, tmp_path / "server.log")
    with made.client() as client:
        until(lambda: client.get("/ready").status_code == 200)
    yield made
    if made.popen.poll() is None:
        made.popen.kill()
        made.popen.wait()


def until(happens):
    """Wait for a condition."""
    end = time.monotonic() + 240
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_leaves_frees_its_slots_and_a_signal_drains(server, tmp_path):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client.images.generate(
        prompt="R", n=10, stream=True, partial_images=3, extra_body={"num_inference_steps": 1000}
    ) as stream:
        assert next(iter(stream)).type == "image_generation.partial_image"
    with server.client() as http:
        until(lambda: 'outcome="cancelled"' in http.get("/metrics").text)
        assert http.get("/load").json()["unfinished"] == 0

    long = {"num_inference_steps": 500}
    with ThreadPoolExecutor() as pool, server.client() as http:
        answer = pool.submit(client.images.generate, prompt="R", n=4, extra_body=long)
        until(lambda: answer.done() or http.get("/load").json()["unfinished"] == 1)
        assert server.stop(120) == 0
        images = [
            Image.open(io.BytesIO(base64.b64decode(i.b64_json))) for i in answer.result().data
        ]
    assert [image.size for image in images] == [(8, 8)] * 4
    assert '"stopped": true' in (tmp_path / "run" / "server.jsonl").read_text().replace(
        '"stopped":true', '"stopped": true'
    )
