"""Chat templates and special tokens in the files of a model's directory."""

import json
from pathlib import Path
from typing import Any

from fornax.config.errors import EngineError

__all__ = ["read_special_tokens", "read_templates"]


def read_templates(directory: Path) -> dict[str, str]:
    """Templates by name; empty when the directory has none.

    `chat_template.jinja` and `additional_chat_templates/*.jinja`, else the key `chat_template` of
    `chat_template.json` or `tokenizer_config.json`: a text, or texts by name.
    """
    folder = directory / "additional_chat_templates"
    files = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: _text(file) for name, file in files.items()}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _json(directory / name).get("chat_template")
        if found:
            return _named(found, directory / name)
    return {}


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by role, such as `bos_token`, from the files beside the tokenizer."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _json(directory / name).items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                tokens[key] = value
    return tokens


def _named(found: Any, file: Path) -> dict[str, str]:
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, dict):
        found = [{"name": name, "template": text} for name, text in found.items()]
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise EngineError(
            f"{file}: chat_template must be a text or a list of name and template"
        ) from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{file} cannot be read ({error})") from error


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(_text(file))
    except ValueError as error:
        raise EngineError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise EngineError(f"{file} must hold a JSON object")
    return content
