"""The OpenAPI document: FastAPI's own, and infer and generate, which FastAPI never sees."""

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fornax.serving.http import schemas
from fornax.serving.http.routing import failures

__all__ = ["describe"]

_REF = "#/components/schemas/"
_FAILURES = (404, 409, 429, 501, 503, 504)
_OUTSIDE = (
    schemas.InferBody,
    schemas.InferAnswer,
    schemas.GenerateBody,
    schemas.GenerateAnswer,
)
"""Schemas of the calls that FastAPI never sees."""
_HEADER = "Inference-Header-Content-Length"
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
Json = dict[str, object]


def describe(app: FastAPI) -> dict[str, object]:
    """The document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        known = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):  # those are errors like any other
            known.pop(name, None)
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for model in _OUTSIDE:
            schema = model.model_json_schema(ref_template=_REF + "{model}")
            known |= schema.pop("$defs", {})
            known[model.__name__] = schema
        for versioned in (False, True):
            path = "/v2/models/{model}" + "/versions/{version}" * versioned
            document["paths"] |= {
                f"{path}/infer": {"post": _infer(versioned)},
                f"{path}/generate": {"post": _generate(versioned)},
                f"{path}/generate_stream": {"post": _generate_stream(versioned)},
            }
        app.openapi_schema = document
    return app.openapi_schema


def _infer(versioned: bool) -> Json:
    behind: Json = {
        "name": _HEADER,
        "in": "header",
        "required": False,
        "description": "Bytes of JSON, where binary tensors follow it.",
        "schema": {"type": "integer", "minimum": 1},
    }
    return _operation(
        "infer",
        versioned,
        "Compute a function of a model: its first, or that of `model:function` or of parameter "
        "`function`.",
        {**_json("InferBody"), **_BINARY},
        {**_json("InferAnswer"), **_BINARY},
        f"The outputs; binary ones follow the JSON, whose size is in {_HEADER}.",
        [behind],
    )


def _generate(versioned: bool) -> Json:
    about = "Answer in plain JSON, as Triton's generate extension has it."
    return _operation("generate", versioned, about, _json("GenerateBody"), _json("GenerateAnswer"))


def _generate_stream(versioned: bool) -> Json:
    return _operation(
        "generate_stream",
        versioned,
        "Answer in plain JSON, as server-sent events: a language model's text as it is made. Each "
        "is `data: GenerateAnswer`, or `data: ErrorAnswer`, which ends the stream.",
        _json("GenerateBody"),
        {"text/event-stream": {"schema": {"type": "string"}}},
    )


def _operation(
    name: str,
    versioned: bool,
    description: str,
    body: Json,
    answer: Json,
    about_answer: str = "The answer.",
    parameters: Sequence[Json] = (),
) -> Json:
    """A call of a model, or of a version of it; `body` and `answer` by their content types."""
    in_path = [
        {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
        for each in ("model", "version")[: 1 + versioned]
    ]
    refusals = {
        str(status): {"description": each["description"], "content": _json("ErrorAnswer")}
        for status, each in failures(*_FAILURES).items()
    }
    return {
        "tags": ["Inference"],
        "summary": name.replace("_", " ").capitalize(),
        "description": description,
        "operationId": "version_" * versioned + name,
        "parameters": [*in_path, *parameters],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": about_answer, "content": answer}, **refusals},
    }


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF + schema}}}
