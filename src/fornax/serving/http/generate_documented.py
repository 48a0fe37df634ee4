"""The generate extension in the OpenAPI document: its paths, and what they take and give."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SCHEMAS", "generate_paths"]

_REF = "#/components/schemas/"


class GenerateBody(BaseModel):
    """A request by the names of the model's inputs: a bare element or lists for each."""

    model_config = ConfigDict(extra="allow")
    text_input: Any = Field(None, description="The prompt, where the model is one of language.")
    id: str | None = None
    parameters: dict[str, Any] | None = Field(
        None,
        description="`max_tokens`, `temperature` and the like; inputs may stand here as well. "
        "`timeout` in microseconds, `priority` (1 goes first), `function`.",
    )


class GenerateAnswer(BaseModel):
    """An answer by the names of the model's outputs; those of one element are bare."""

    model_config = ConfigDict(extra="allow")
    model_name: str
    model_version: str
    text_output: Any = Field(None, description="The text, where the model is one of language.")
    id: str | None = None
    done: bool | None = Field(None, description="Of an event: whether it is the last.")


SCHEMAS: tuple[type[BaseModel], ...] = (GenerateBody, GenerateAnswer)


def generate_paths(failures: dict[str, Any]) -> dict[str, Any]:
    """The paths; `failures` are their responses beside 200."""
    return {
        f"/v2/models/{{model}}{version}/generate{ending}": {
            "post": _operation(bool(version), bool(ending), failures)
        }
        for version in ("", "/versions/{version}")
        for ending in ("", "_stream")
    }


def _operation(versioned: bool, streams: bool, failures: dict[str, Any]) -> dict[str, Any]:
    names = ["model", "version"] if versioned else ["model"]
    answer: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + "GenerateAnswer"}}}
    if streams:
        answer = {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        "tags": ["Inference"],
        "summary": "Generate stream" if streams else "Generate",
        "description": "Answer in plain JSON, as "
        + (
            "server-sent events: a language model's text as it is made. Each is "
            "`data: GenerateAnswer`, or `data: ErrorAnswer`, which ends the stream."
            if streams
            else "Triton's generate extension has it."
        ),
        "operationId": f"{'version_' * versioned}generate{'_stream' * streams}",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF + "GenerateBody"}}},
        },
        "responses": {"200": {"description": "The answer.", "content": answer}, **failures},
    }
