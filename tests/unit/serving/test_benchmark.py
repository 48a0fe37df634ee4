"""What the model-server benchmark sends is what the server reads, and the other way round."""

import importlib
import pathlib

import numpy as np
import pytest

from fornax.serving.access import Limits
from fornax.serving.types import InferResult
from fornax.serving.v2.request import Decoder
from fornax.serving.v2.response import encode
from fornax.serving.v2.shared_memory import SharedMemory

BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_model_server_load")


@pytest.mark.parametrize("name", ["mlp", "recommender", "encoder"])
def test_server_reads_what_the_clients_send(load, name):
    model = load.models.MODELS[name]
    inputs = model.requests(1)[0]
    head, body = load.wires.request("v2-binary", model, inputs, "/").split(b"\r\n\r\n", 1)
    headers = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    size = int(headers["Inference-Header-Content-Length"])
    decoder = Decoder(Limits(), SharedMemory(enabled=False))
    request, _ = decoder.decode(body, size, name)
    assert request.inputs.keys() == inputs.keys()
    for each, array in inputs.items():
        np.testing.assert_array_equal(request.inputs[each], array, strict=True)


def test_clients_read_what_the_server_answers_and_refuse_wrong_values(load):
    model = load.models.MODELS["mlp"]
    scores = np.arange(10, dtype=np.float32)[None] / 45
    data = load.wires.request("v2-binary", model, model.requests(1)[0], "/")
    body = data.split(b"\r\n\r\n", 1)[1]
    decoder = Decoder(Limits(), SharedMemory(enabled=False))
    _, wanted = decoder.decode(body, body.index(b"]}") + 2, "mlp")
    text, binary = encode(InferResult("mlp", "1", "", "", {"scores": scores}), wanted)
    got = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: %d\r\n\r\n" % len(text)
    got += text + b"".join(binary)
    assert load.check("v2-binary", model, [(0, got)], scores[None]) == 0
    with pytest.raises(load.WrongAnswerError, match="off by"):
        load.check("v2-binary", model, [(0, got)], scores[None] + 1e-3)


def test_padding_takes_the_smallest_bucket_and_tells_lengths(load):
    model = load.models.MODELS["encoder"]
    requests = [{"ids": np.ones((1, size), np.int32)} for size in (5, 17)]
    made = load.models.assemble(model, requests)
    assert made["ids"].shape == (4, 24)
    assert made["lengths"].tolist() == [5, 17, 0, 0]
    assert made["ids"].sum() == 22
