"""Reference pages as Markdown from the code: `python -m fornax.cli.reference DIRECTORY`.

Commands come from their `Arguments`, configs from their dataclasses, environment variables from
the one file that reads them; so the pages cannot say anything else than the code does.
"""

import dataclasses
import enum
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fornax.cli import registry
from fornax.cli.registry import Command, Group
from fornax.config import Field, describe
from fornax.config.environment import documented
from fornax.config.schema import field_docs
from fornax.mesh import USES, across_table, axes_table, processes_table
from fornax.models import MODEL_USES, models_table

if TYPE_CHECKING:
    from fornax.llm.server.protocol import Body


def write_reference(directory: Path) -> list[Path]:
    """Write the pages into a folder; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pages = {
        "cli.md": commands_page(),
        "config.md": config_page(),
        "requests.md": requests_page(),
        "recipes.md": _recipes_page(),
        "kernels.md": _kernels_page(),
    }
    for name, text in pages.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in pages]


def commands_page() -> str:
    """Every command with its arguments and the config whose keys it takes; the environment."""
    parts = ["# Command line", "", "Every command answers `--help`; none asks questions.", ""]
    for command in _commands(registry.ROOT):
        parts += _command(command)
    variables = [(f"`{name}`", meaning) for name, meaning in documented().items()]
    parts += ["## Environment variables", "", *_table(("Variable", "Meaning"), variables), ""]
    return "\n".join(parts)


def config_page() -> str:
    """Every key of every config that a command reads."""
    parts = [
        "# Configuration keys",
        "",
        "A file holds only the keys that differ from the defaults below. Every key is also a flag:",
        "`--model.num-layers 4`. A union is chosen by its `type`; keys of one variant stand under",
        "its name. `N` is the index of a list element, `KEY` a name of yours.",
        "",
    ]
    readers: dict[type, list[str]] = {}
    for command in _commands(registry.ROOT):
        if command.config is not None:
            readers.setdefault(command.config(), []).append(f"`fornax {command.name}`")
    from fornax.serving.settings import ModelSettings

    readers[ModelSettings] = ["`fornax host` as the `serving.yaml` of a model"]
    for cls, programs in readers.items():
        parts += _config(cls, ", ".join(programs))
    said = "What divides over an axis of `mesh`, and which commands can give it a size above 1."
    parts += ["## Mesh axes", "", said, ""]
    parts += [*_table(("Axis", "Divides", *(f"`{use}`" for use in USES)), axes_table()), ""]
    said = "What `mesh.across` gives each slice a part of, and what crosses between slices then."
    heads = ("Across", "Slices divide", "Crosses between them", *(f"`{use}`" for use in USES))
    parts += [said, "", *_table(heads, across_table()), ""]
    said = "In how many processes each kind of run works; any number need not divide anything."
    parts += ["## Processes", "", said, ""]
    parts += [*_table(("Run", "Processes"), processes_table()), ""]
    parts += [*_table(("Model", *MODEL_USES), models_table()), ""]
    return "\n".join(parts)


def requests_page() -> str:
    """Every field of a request to the server, and of `SamplingParams`."""
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
    return [f"### `{path}`", "", *_table(("Field", "Default", ""), rows), ""]


def _parameters(cls: type, refused: Mapping[str, str]) -> list[str]:
    """Field, default, and what Fornax does with it, for each field of a dataclass."""
    rows = []
    for field in dataclasses.fields(cls):
        text, default = field_docs(cls)[field.name], field.default
        if field.name in refused:
            text = f"**Refused**: {refused[field.name]}. {text}"
        shown = default.name if isinstance(default, enum.Enum) else repr(default)
        rows.append((f"`{field.name}`", f"`{shown}`", text))
    return [f"### {cls.__name__}", "", *_table(("Field", "Default", ""), rows), ""]


def _recipes_page() -> str:
    from fornax.plan.recipes import recipes_page

    return recipes_page()


def _kernels_page() -> str:
    from fornax.plan.kernels.report import NOTE, support_rows

    head = ("Operation", "Implementation", "CPU", "TPU", "GPU")
    rows = [(f"`{name}`", f"`{one}`", *levels) for name, one, *levels in support_rows()]
    said = f"In order of preference. {NOTE[0].upper()}{NOTE[1:]}. `fornax kernels list` prints it."
    return "\n".join(["# Kernels", "", said, "", *_table(head, rows), ""])


def _commands(group: Group) -> Iterator[Command]:
    if group.command:
        yield group.command
    for entry in group.commands.values():
        if isinstance(entry, Group):
            yield from _commands(entry)
        else:
            yield entry


def _command(command: Command) -> list[str]:
    module = command.load()
    text, _, examples = inspect.cleandoc(module.Arguments.__doc__ or "").partition("\n\nexample")
    parts = [f"## fornax {command.name}", "", text, ""]
    shown = [line.strip() for line in examples.splitlines()[1:]]
    parts += ["```sh", *shown, "```", ""]
    fields = describe(module.Arguments)
    rows = [(f"`{_flag(field)}`", *_cells(field)) for field in fields]
    parts += [*_table(("Argument", "Type", "Default", "Meaning"), rows), ""] if rows else []
    if command.config is not None:
        name = command.config().__name__
        parts += [
            f"It also takes every key of [`{name}`](config.md#{name.lower()}) as a flag.",
            "",
        ]
    return parts


def _flag(field: Field) -> str:
    return f"--{field.path.replace('_', '-')}"


def _config(cls: type, programs: str) -> list[str]:
    parts = [f"## {cls.__name__}", "", f"{inspect.getdoc(cls)} Read by {programs}.", ""]
    fields = describe(cls)
    own = [field for field in fields if "." not in field.path]
    parts += _keys(own)
    nested = [field for field in fields if "." in field.path]
    for section, group in itertools.groupby(nested, key=lambda field: field.path.split(".")[0]):
        parts += [f"### {cls.__name__}: {section}", ""]
        for variant, members in itertools.groupby(group, key=lambda field: field.variant):
            parts += [f"With `type: {variant}`:", ""] if variant else []
            parts += _keys(list(members))
    return parts


def _keys(fields: Sequence[Field]) -> list[str]:
    rows = [(f"`{field.path}`", *_cells(field)) for field in fields]
    return [*_table(("Key", "Type", "Default", "Meaning"), rows), ""] if rows else []


def _cells(field: Field) -> tuple[str, str, str]:
    return f"`{field.type}`", f"`{field.default}`", field.doc


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


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
