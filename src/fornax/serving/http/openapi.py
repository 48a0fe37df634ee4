"""The OpenAPI document: FastAPI's own, and infer and generate, which FastAPI never sees."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fornax.serving.http import schemas
from fornax.serving.http.documented import failures
from fornax.serving.http.generate_documented import SCHEMAS, generate_paths

__all__ = ["describe"]

_REF = "#/components/schemas/"
_FAILURES = (404, 409, 429, 501, 503, 504)
_HEADER = "Inference-Header-Content-Length"


def describe(app: FastAPI) -> dict[str, Any]:
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
        for model in (schemas.InferBody, schemas.InferAnswer, *SCHEMAS):
            schema = model.model_json_schema(ref_template=_REF + "{model}")
            known |= schema.pop("$defs", {})
            known[model.__name__] = schema
        for versioned in (False, True):
            path = "/v2/models/{model}/versions/{version}/infer"
            path = path if versioned else path.replace("/versions/{version}", "")
            document["paths"][path] = {"post": _inference(versioned)}
        document["paths"] |= generate_paths(_failures())
        app.openapi_schema = document
    return app.openapi_schema


def _inference(versioned: bool) -> dict[str, Any]:
    names = ["model", "version"] if versioned else ["model"]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    behind = {
        "name": _HEADER,
        "in": "header",
        "required": False,
        "description": "Bytes of JSON, where binary tensors follow it.",
        "schema": {"type": "integer", "minimum": 1},
    }
    return {
        "tags": ["Inference"],
        "summary": "Infer",
        "description": "Compute a function of a model: its first, or that of `model:function` or "
        "of parameter `function`.",
        "operationId": "version_infer" if versioned else "infer",
        "parameters": [*parameters, behind],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": _REF + "InferBody"}},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "200": {
                "description": "The outputs; binary ones follow the JSON, whose size is in "
                f"{_HEADER}.",
                "content": {
                    "application/json": {"schema": {"$ref": _REF + "InferAnswer"}},
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **_failures(),
        },
    }


def _failures() -> dict[str, Any]:
    return {str(status): _failure(each) for status, each in failures(*_FAILURES).items()}


def _failure(about: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + "ErrorAnswer"}}}
    return {"description": about["description"], "content": content}
