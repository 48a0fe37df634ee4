"""Schemathesis: whatever the OpenAPI document allows or does not, the answer is as it says."""

import contextlib

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.unit.serving.http.conftest import Caller

from fornax.serving.http.openapi import describe
from fornax.serving.v2.shared_memory import SharedMemory

CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Caller:
    memory = SharedMemory(folder=tmp_path_factory.mktemp("shm"))
    return Caller(shared_memory=memory, metrics=lambda: (b"up 1\n", "text/plain"))


@pytest.fixture(scope="module")
def document(caller):
    return describe(caller.app.routes)


@pytest.fixture(scope="module")
def schema(caller, document):
    return schemathesis.openapi.from_asgi("/openapi.json", caller.app)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(GenerationMode.POSITIVE, marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.exhaustive),
    ],
)
def test_whatever_is_sent_the_answer_is_as_documented(schema, mode):
    sent = set()
    for path, methods in schema.items():
        for method in methods:
            operation = schema[path][method]

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=5,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            def send(case):
                sent.add(case.operation.path)
                case.call_and_validate(checks=CHECKS)

            with contextlib.suppress(Unsatisfiable):  # nothing in it can be wrong
                send()
    assert len(sent) >= 10


def test_the_document_has_every_path_of_the_protocol(document):
    model = ("", "/ready", "/infer", "/generate", "/generate_stream", "/config", "/stats")
    expected = {
        *(f"/v2/models/{{model}}{rest}" for rest in model),
        *(f"/v2/models/{{model}}/versions/{{version}}{rest}" for rest in model),
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/repository/index",
        "/v2/models/stats",
        "/metrics",
        *(f"/v2/repository/models/{{model}}/{what}" for what in ("load", "unload", "rollback")),
        *(f"/v2/systemsharedmemory/region/{{region}}/{what}" for what in ("register", "status")),
    }
    assert expected <= document["paths"].keys()


def test_the_document_says_what_it_names(document):
    schemas = document["components"]["schemas"]
    text = repr(document)
    for name in ("InferBody", "InputTensor", "InferAnswer", "GenerateBody", "ErrorAnswer"):
        assert f"#/components/schemas/{name}'" in text
        assert schemas[name]["description"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["description"].endswith("."), path
            assert {"400", "500"} <= operation["responses"].keys()
