"""The documentation's tables of request fields, made from the code."""

from fornax.llm.server.protocol.base import Body
from fornax.llm.server.protocol.chat import ChatBody
from fornax.llm.server.protocol.completions import CompletionBody
from fornax.llm.server.protocol.embeddings import EmbeddingBody

__all__ = ["request_tables"]

_BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
}


def request_tables() -> str:
    """One Markdown table per endpoint: field, default, and what Fornax does with it."""
    return "\n\n".join(_table(path, body) for path, body in _BODIES.items()) + "\n"


def _table(path: str, body: type[Body]) -> str:
    lines = [f"### `{path}`", "", "| Field | Default | |", "| --- | --- | --- |"]
    for name, field in body.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default!r}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
    for name, refused in sorted(body.refused.items()):
        passes = ", ".join(f"`{value!r}`" for value in refused.neutral)
        but = f" ({passes} passes)" if passes else ""
        lines.append(f"| `{name}` | | **Refused**: {refused.reason}{but}. |")
    return "\n".join(lines)
