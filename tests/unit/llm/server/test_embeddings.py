"""`/v1/embeddings`: shapes, base64, shortened vectors, what is refused."""

import base64
import math
import struct

import pytest

from fornax.llm.outputs import EmbeddingOutput


def test_each_input_gets_its_vector_in_order(app):
    body = app.post("/v1/embeddings", {"input": ["hello", "world", "hello"], "model": "m"}).json()
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    vectors = [item["embedding"] for item in body["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 4


def test_token_ids_are_taken_one_text_or_several(app):
    assert len(app.post("/v1/embeddings", {"input": [1, 2, 3]}).json()["data"]) == 1
    assert len(app.post("/v1/embeddings", {"input": [[1], [2, 3]]}).json()["data"]) == 2


def test_base64_holds_the_same_numbers(app):
    floats = app.post("/v1/embeddings", {"input": "hello"}).json()["data"][0]["embedding"]
    coded = app.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(floats)}f", raw)) == floats


def test_a_shortened_vector_has_unit_length(app, monkeypatch):
    async def embed(ids, *, request_id, **options):
        return EmbeddingOutput(request_id, [3.0, 4.0, 12.0], ids)

    monkeypatch.setattr(app.engine, "embed", embed)
    reply = app.post("/v1/embeddings", {"input": "hello", "dimensions": 2}).json()
    vector = reply["data"][0]["embedding"]
    assert vector == [0.6, 0.8]
    assert math.hypot(*vector) == 1.0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["hello", ""]}, "input"),
        ({"input": "hello " * 100}, "input"),
        ({"input": {}}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1000}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"normalize": False}, "normalize"),
    ],
)
def test_what_cannot_be_honoured_names_the_field(app, change, param):
    reply = app.post("/v1/embeddings", {"input": "hello", **change})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_truncation_makes_a_long_text_fit(app):
    body = {"input": "hello " * 100, "truncate_prompt_tokens": -1}
    assert app.post("/v1/embeddings", body).json()["usage"]["prompt_tokens"] == 64


def test_one_failing_input_fails_the_request_once(app):
    reply = app.post("/v1/embeddings", {"input": [[1], [10**6], [10**6]]})
    assert reply.status_code == 400
