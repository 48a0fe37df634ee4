"""The documentation's table of sampling parameters, made from the code."""

import dataclasses

from fornax.config.schema import field_docs
from fornax.llm.sampling_params import (
    REFUSED,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

__all__ = ["sampling_tables"]


def sampling_tables() -> str:
    """One Markdown table per class: field, default, and what Fornax does with it."""
    classes = (SamplingParams, StructuredOutputsParams, RepetitionDetectionParams)
    return "\n\n".join(_table(cls) for cls in classes) + "\n"


def _table(cls: type) -> str:
    docs = field_docs(cls)
    lines = [f"### {cls.__name__}", "", "| Field | Default | |", "| --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        text = docs[field.name]
        if cls is SamplingParams and field.name in REFUSED:
            text = f"**Refused**: {REFUSED[field.name]}. {text}"
        lines.append(f"| `{field.name}` | `{_default(field.default)}` | {text} |")
    return "\n".join(lines)


def _default(value: object) -> str:
    return value.name if hasattr(value, "name") else repr(value)
