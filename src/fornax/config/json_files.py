"""JSON objects in the files of a model, which other programs wrote."""

import json
from pathlib import Path
from typing import Any

from fornax.config.errors import CheckpointError

__all__ = ["read_json_object"]


def read_json_object(file: Path, missing: str = "copy it again") -> dict[str, Any]:
    """The object in a file.

    Args:
      file: in UTF-8.
      missing: what to do where it cannot be opened.

    Raises:
      CheckpointError: it cannot be opened, is not JSON, or holds another value than an object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{file} cannot be read ({reason}); {missing}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}; copy it again") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise CheckpointError(f"{file} holds a {kind}, not a mapping of keys; copy it again")
    return values
