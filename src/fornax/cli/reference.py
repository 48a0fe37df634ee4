"""Reference pages as Markdown from the code: `python -m fornax.cli.reference DIRECTORY`.

Commands come from their `Arguments`, configs from their dataclasses, environment variables from
the one file that reads them; so the pages cannot say anything else than the code does.
"""

import dataclasses
import enum
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fornax.cli import registry
from fornax.cli.config_reference import config_page, config_pages, table
from fornax.cli.registry import Command
from fornax.config import Field, describe
from fornax.config.environment import documented
from fornax.config.schema import field_docs
from fornax.kernels import blocks_table
from fornax.models import formats_table

if TYPE_CHECKING:
    from fornax.llm.server.protocol import Body


def write_reference(directory: Path) -> list[Path]:
    """Write the pages into a folder, that of recipes with their plans too; return their paths."""
    from fornax.plan.recipes_page import recipes_page

    directory.mkdir(parents=True, exist_ok=True)
    pages = {**reference_pages(), "recipes.md": recipes_page()}
    for name, text in pages.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in pages]


def reference_pages() -> dict[str, str]:
    """The pages that say what the code has, by their files' names."""
    return {
        "cli.md": commands_page(),
        **config_pages(),
        "requests.md": requests_page(),
        "kernels.md": _kernels_page(),
        "quantized.md": _quantized_page(),
    }


def commands_page() -> str:
    """Every command with its arguments and the config whose keys it takes; the environment."""
    parts = ["# Command line", "", "Every command answers `--help`; none asks questions.", ""]
    for command in registry.commands():
        parts += _command(command)
    variables = [(f"`{name}`", meaning) for name, meaning in documented().items()]
    parts += ["## Environment variables", "", *table(("Variable", "Meaning"), variables), ""]
    return "\n".join(parts)


def requests_page() -> str:
    """Every field of a request to the server, and of `SamplingParams`."""
    from fornax.diffusion.server.app import REQUEST_BODIES as IMAGE_BODIES
    from fornax.llm.sampling_params import (
        REFUSED,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from fornax.llm.server import REQUEST_BODIES

    return "\n".join(
        [
            "# Request fields",
            "",
            "What `fornax serve` does with each field of a request's body. A refused field is an",
            "error with status 400 that names it.",
            "",
            "## HTTP",
            "",
            *(line for path, body in REQUEST_BODIES.items() for line in _body(path, body)),
            "## Images",
            "",
            "Of `fornax diffusion serve`; edits and variations are forms.",
            "",
            *(line for path, body in IMAGE_BODIES.items() for line in _body(path, body)),
            "## Python",
            "",
            *_parameters(SamplingParams, REFUSED),
            *_parameters(StructuredOutputsParams, {}),
            *_parameters(RepetitionDetectionParams, {}),
        ]
    )


def _body(path: str, body: "type[Body]") -> list[str]:
    rows = []
    for name, field in body.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default!r}`"
        rows.append((f"`{name}`", default, field.description or ""))
    for name, refused in sorted(body.refused.items()):
        passes = ", ".join(f"`{value!r}`" for value in refused.neutral)
        but = f" ({passes} passes)" if passes else ""
        rows.append((f"`{name}`", "", f"**Refused**: {refused.reason}{but}."))
    return [f"### `{path}`", "", *table(("Field", "Default", ""), rows), ""]


def _parameters(cls: type, refused: Mapping[str, str]) -> list[str]:
    """Field, default, and what Fornax does with it, for each field of a dataclass."""
    rows = []
    for field in dataclasses.fields(cls):
        text, default = field_docs(cls)[field.name], field.default
        if field.name in refused:
            text = f"**Refused**: {refused[field.name]}. {text}"
        shown = default.name if isinstance(default, enum.Enum) else repr(default)
        rows.append((f"`{field.name}`", f"`{shown}`", text))
    return [f"### {cls.__name__}", "", *table(("Field", "Default", ""), rows), ""]


def _kernels_page() -> str:
    from fornax.plan.kernels.report import NOTE, support_rows

    head = ("Operation", "Implementation", "CPU", "TPU", "GPU")
    rows = [(f"`{name}`", f"`{one}`", *levels) for name, one, *levels in support_rows()]
    said = f"In order of preference. {NOTE[0].upper()}{NOTE[1:]}. `fornax kernels list` prints it."
    return "\n".join(["# Kernels", "", said, "", *table(head, rows), ""])


def _quantized_page() -> str:
    read = ("`quant_method`", "Read", "A code times its scale is rounded to")
    head = (*read, "Served as stored, on one CPU")
    said = (
        "Which quantized weights of Hugging Face directories are read, and dequantized to floats "
        "where they are not [served as they are](../guides/serving.md#quantized-weights)."
    )
    directories = ["# Quantized files", "", said, "", *table(head, formats_table()), ""]
    head = ("Type", "Bits of a code", "Inputs of a scale", "Scales", "Bits per weight", "As served")
    said = (
        "Which tensors of [GGUF files](../guides/models.md#gguf-files) are read, and of which the "
        "blocks are multiplied as they are on one CPU device, with the bits that a weight takes."
    )
    return "\n".join([*directories, "## GGUF", "", said, "", *table(head, blocks_table()), ""])


def _command(command: Command) -> list[str]:
    module = command.load()
    text, _, examples = inspect.cleandoc(module.Arguments.__doc__ or "").partition("\n\nexample")
    parts = [f"## fornax {command.name}", "", text, ""]
    shown = [line.strip() for line in examples.splitlines()[1:]]
    parts += ["```sh", *shown, "```", ""]
    fields = describe(module.Arguments)
    rows = [(f"`{_flag(f)}`", f"`{f.type}`", f"`{f.default}`", f.doc) for f in fields]
    parts += [*table(("Argument", "Type", "Default", "Meaning"), rows), ""] if rows else []
    if command.config is not None:
        config = command.config()
        link = f"[`{config.__name__}`]({config_page(config)})"
        parts += [f"It also takes every key of {link} as a flag.", ""]
    return parts


def _flag(field: Field) -> str:
    return f"--{field.path.replace('_', '-')}"


def main(arguments: Sequence[str]) -> int:
    """Write the pages into the folder named."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m fornax.cli.reference DIRECTORY", file=sys.stderr)  # noqa: T201
        return 2
    for path in write_reference(Path(arguments[0])):
        print(path)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
