"""`response_format` and `structured_outputs`: what a request may ask the text to be."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.base import Body, Listed, Refused

__all__ = ["ResponseFormat", "StructuredOutputs"]


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON, and vLLM's for a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: Listed[dict[str, Any]] | None = None
    triggers: Listed[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and (
            self.json_schema is None or self.json_schema.json_schema is None
        ):
            raise ApiError(
                400,
                "response_format.type=json_schema needs json_schema with a schema",
                param="response_format",
            )
        return self


class StructuredOutputs(Body):
    """vLLM's way: exactly one constraint."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    refused: ClassVar[Mapping[str, Refused]] = {
        "disable_fallback": Refused("there is one backend, llguidance", (False, True)),
    }
