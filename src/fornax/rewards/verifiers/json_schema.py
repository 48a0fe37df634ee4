"""Is the completion JSON that a schema accepts? By the jsonschema library."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.config.errors import ConfigError
from fornax.rewards.verifiers.extract import fenced_block

__all__ = ["TABLE", "JsonSchemaOptions"]


@dataclass(frozen=True, kw_only=True)
class JsonSchemaOptions:
    """What the verifier `json_schema` holds completions against."""

    schema: Path | None = None
    """A file with the schema for all; null reads it from each line's column."""
    column: str = "schema"
    """The column with the schema (JSON, or text of JSON), where there is no file."""
    fenced: bool = True
    """Whether the last ``` block, where there is one, is the answer instead of the whole text."""


def _json_schema(options: JsonSchemaOptions) -> tuple[Callable[..., float], tuple[str, ...]]:
    try:
        import jsonschema
        from jsonschema.validators import validator_for
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the verifier json_schema needs jsonschema: pip install 'fornax-ai[tune]'"
        ) from error

    def validator(schema: Any) -> Any:
        if isinstance(schema, str):
            schema = json.loads(schema)
        kind = validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    fixed = None
    if options.schema is not None:
        try:
            fixed = validator(options.schema.read_text(encoding="utf-8"))
        except (OSError, ValueError, jsonschema.SchemaError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"schema={options.schema} cannot be used: {reason}") from error

    def verify(prompt: object, completion: str, **record: object) -> float:
        del prompt
        text = (fenced_block(completion) if options.fenced else None) or completion
        check = fixed or validator(record[options.column])
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(check.is_valid(value))

    return verify, () if fixed else (options.column,)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


TABLE = {"json_schema": (JsonSchemaOptions, _json_schema)}
