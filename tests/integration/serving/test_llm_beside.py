"""A language model and a bundle in one `fornax host`: V2, OpenAI's routes, unloading."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.unit.models.conftest import CONFIGS

from fornax.cli.main import main as fornax
from fornax.data import train_bpe
from fornax.models import create_decoder, save_pretrained
from fornax.serving.grpc.client import Client

pytestmark = pytest.mark.exhaustive

SETTINGS = """type: llm
model: weights
block_size: 4
max_num_seqs: 4
max_num_batched_tokens: 8
max_model_len: 64
"""
PARAMETERS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def _config(vocab_size):
    plain = dataclasses.replace(CONFIGS["windowed"], attention_logit_softcap=None)
    return dataclasses.replace(plain, vocab_size=vocab_size)


def _ask(text):
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}
    return {"inputs": [tensor], "parameters": PARAMETERS}


def test_an_llm_answers_beside_a_bundle_and_is_unloaded(start, repository, capsys):
    folder = repository / "lm"
    folder.mkdir()
    tokenizer = train_bpe(["hello world this is a test of some text " * 20], 300)
    save_pretrained(create_decoder(_config(tokenizer.vocab_size), seed=1), folder / "weights")
    tokenizer.backend.save(str(folder / "weights" / "tokenizer.json"))
    (folder / "serving.yaml").write_text(SETTINGS)
    server = start(repository)
    url = server.address("http")
    with httpx.Client(base_url=f"http://{url}", timeout=60) as client:
        assert client.get("/v2/health/ready").status_code == 200
        whole = client.post("/v2/models/lm/infer", json=_ask("hello world")).json()
        text = whole["outputs"][0]["data"][0]
        body = {"model": "lm", "prompt": "hello world", **PARAMETERS}
        completion = client.post("/v1/completions", json=body).json()
        assert text == "hello world" + completion["choices"][0]["text"]
        assert client.get("/v2/models/lm").json()["platform"] == "fornax_llm"
        with Client(server.address("grpc")) as stub:
            assert stub.ready()
        with ThreadPoolExecutor(4) as threads:
            ask = [threads.submit(client.post, "/v2/models/lm/infer", json=_ask("this is"))]
            ask += [threads.submit(client.post, "/v1/completions", json=body) for _ in range(3)]
            assert fornax(["host", "unload", "lm", "--url", url]) == 0
            # What was accepted is answered whole; what came later is refused.
            assert {each.result().status_code for each in ask} <= {200, 503}
        assert client.get("/v1/models").status_code == 503
        assert client.get("/v2/models/lm/ready").status_code != 200
        assert client.get("/v2/models/ranker/ready").status_code == 200
        assert fornax(["host", "load", "lm", "--url", url]) == 0
        again = client.post("/v2/models/lm/infer", json=_ask("hello world")).json()
        assert again["outputs"][0]["data"][0] == text
        assert "vllm:generation_tokens_total" in client.get("/metrics").text
    assert server.stop() == 0
