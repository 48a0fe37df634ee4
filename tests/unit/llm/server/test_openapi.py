"""Schemathesis: whatever the OpenAPI document allows or does not, the answer is as it says."""

import re

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


BODIES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]
OPERATIONS = [
    *[(path, "POST", mode) for path in BODIES for mode in GenerationMode],
    ("/v1/models/{name}", "GET", GenerationMode.POSITIVE),
    ("/is_sleeping", "GET", GenerationMode.POSITIVE),
]


@pytest.fixture
def schema(make_app):
    app = make_app(enable_adapter_endpoints=True, enable_dev_endpoints=True)
    return schemathesis.openapi.from_asgi("/openapi.json", app.asgi)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_whatever_is_sent_the_answer_is_as_documented(schema, path, method, mode, examples):
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        case.call_and_validate(checks=CHECKS)

    send()


def test_the_document_describes_every_field(app):
    document = app.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name in ("CompletionBody", "ChatBody", "EmbeddingBody"):
        assert schemas[name]["additionalProperties"] is False
        for field, about in schemas[name]["properties"].items():
            assert re.match(r"\w", about.get("description", "")), (name, field)


def test_the_document_has_the_promised_paths(app):
    paths = app.get("/openapi.json").json()["paths"]
    promised = ["completions", "chat/completions", "embeddings", "models"]
    rest = {"/tokenize", "/detokenize", "/health", "/ready", "/metrics"}
    assert {f"/v1/{path}" for path in promised} | rest <= paths.keys()
