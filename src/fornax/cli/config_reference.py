"""Pages of the keys of every config: one for each command that reads one, one for each large or
shared part, such as `optim`, and an index."""

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from fornax.cli import registry
from fornax.config import Field, describe
from fornax.mesh import USES, across_table, axes_table, processes_table
from fornax.models import MODEL_USES, models_table

__all__ = ["config_page", "config_pages", "support_tables", "table"]

_SHARED, _LARGE = 8, 60
"""Keys with which a part of several configs, or of one, has a page of its own."""
_SAID = (
    "A file holds only the keys that differ from their defaults. Every key is also a flag: "
    "`--model.num-layers 4`. A union is chosen by its `type`; keys of one variant are under its "
    "name. `N` is the index of a list element, `KEY` a name of yours."
)
_SERVING = "serving.yaml"
_Shape = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """The keys below one key of a config."""

    name: str
    fields: tuple[Field, ...]

    @property
    def shape(self) -> _Shape:
        """All but the defaults: what two configs have in common that hold the same part."""
        return tuple((f.path, f.type, f.doc, f.variant) for f in self.fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Page:
    """A part that has a page: its name, and the configs that hold it."""

    name: str
    part: _Part
    readers: tuple[type, ...]


def config_pages() -> dict[str, str]:
    """Every key of every config that a command reads, as Markdown by the name of its file.

    `config.md` is the index; the others lie in `config/`.
    """
    readers = _readers()
    shared = _shared(readers)
    pages = {"config.md": _index(readers, shared)}
    for cls in readers:
        pages[f"config/{_file(readers[cls][0])}"] = _config(cls, readers, shared)
    for page in shared.values():
        pages[f"config/{page.name}.md"] = _part(page, readers)
    return pages


def config_page(cls: type) -> str:
    """The page of a config, as a path from the reference's folder."""
    return f"config/{_file(_readers()[cls][0])}"


def _file(program: str) -> str:
    """The name of the page of the config that a command reads first."""
    return f"{program.replace(' ', '-').replace('.', '-')}.md"


@functools.cache
def _readers() -> Mapping[type, list[str]]:
    """The commands that read each config, the first of them the page's name."""
    readers: dict[type, list[str]] = {}
    for command in registry.commands():
        if command.config is not None:
            readers.setdefault(command.config(), []).append(command.name)
    from fornax.serving.settings import ModelSettings

    return {**readers, ModelSettings: [_SERVING]}


def _parts(cls: type) -> list[_Part]:
    nested = [field for field in describe(cls) if "." in field.path]
    groups = itertools.groupby(nested, key=lambda field: field.path.split(".")[0])
    return [_Part(name=name, fields=tuple(fields)) for name, fields in groups]


def _shared(readers: Mapping[type, list[str]]) -> dict[_Shape, _Page]:
    """The parts that have pages, by their shape."""
    found: dict[_Shape, list[tuple[type, _Part]]] = {}
    for cls in readers:
        for part in _parts(cls):
            found.setdefault(part.shape, []).append((cls, part))
    pages: dict[_Shape, _Page] = {}
    names = {_file(programs[0]) for programs in readers.values()}
    for shape, holders in found.items():
        if len(shape) < (_LARGE if len(holders) == 1 else _SHARED):
            continue
        first, part = holders[0]
        name = part.name.replace("_", "-")
        if f"{name}.md" in names:
            name = f"{_file(readers[first][0]).removesuffix('.md')}-{name}"
        names.add(f"{name}.md")
        pages[shape] = _Page(name=name, part=part, readers=tuple(cls for cls, _ in holders))
    return pages


def _index(readers: Mapping[type, list[str]], shared: Mapping[_Shape, _Page]) -> str:
    parts = ["# Configuration keys", "", _SAID, "", "## Configs", ""]
    rows = []
    for cls, programs in readers.items():
        said = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        link = f"[`{cls.__name__}`](config/{_file(programs[0])})"
        rows.append((_programs(programs), link, str(len(describe(cls))), said))
    parts += [*table(("Read by", "Config", "Keys", ""), rows), ""]
    parts += ["## Parts", "", "What several configs have in common, or what is long.", ""]
    rows = [
        (
            f"[`{page.part.name}`](config/{page.name}.md)",
            str(len(page.part.fields)),
            ", ".join(f"`{cls.__name__}`" for cls in page.readers),
        )
        for page in shared.values()
    ]
    parts += [*table(("Part", "Keys", "Of"), rows), ""]
    return "\n".join([*parts, *support_tables()])


def support_tables() -> list[str]:
    """Lines that say which commands divide over which axis, and over how many processes."""
    said = "What divides over an axis of `mesh`, and which commands can give it a size above 1."
    parts = ["## Mesh axes", "", said, ""]
    parts += [*table(("Axis", "Divides", *(f"`{use}`" for use in USES)), axes_table()), ""]
    said = "What `mesh.across` gives each slice a part of, and what crosses between slices then."
    heads = ("Across", "Slices divide", "Crosses between them", *(f"`{use}`" for use in USES))
    parts += [said, "", *table(heads, across_table()), ""]
    said = "In how many processes each kind of run works; any number need not divide anything."
    parts += ["## Processes", "", said, ""]
    parts += [*table(("Run", "Processes"), processes_table()), ""]
    parts += [*table(("Model", *MODEL_USES), models_table()), ""]
    return parts


def _config(
    cls: type,
    readers: Mapping[type, list[str]],
    shared: Mapping[_Shape, _Page],
) -> str:
    said = f"{inspect.getdoc(cls)} Read by {_programs(readers[cls])}."
    parts = [f"# {cls.__name__}", "", said, "", "[All configs](../config.md).", ""]
    parts += _keys([field for field in describe(cls) if "." not in field.path])
    for part in _parts(cls):
        parts += [f"## {part.name}", ""]
        page = shared.get(part.shape)
        if page is None:
            parts += _by_variant(part.fields)
            continue
        pairs = zip(part.fields, page.part.fields, strict=True)
        others = [field for field, first in pairs if field.default != first.default]
        parts += [f"The keys of [`{part.name}`]({page.name}.md).", ""]
        if others:
            parts += ["With other defaults than there:", "", *_by_variant(others)]
    return "\n".join(parts)


def _part(page: _Page, readers: Mapping[type, list[str]]) -> str:
    links = [f"[`{cls.__name__}`]({_file(readers[cls][0])})" for cls in page.readers]
    first = page.readers[0].__name__
    told = f" Defaults are those of `{first}`; the others' pages name theirs." if links[1:] else ""
    parts = [f"# {page.part.name}", "", f"A part of {', '.join(links)}.{told}", ""]
    return "\n".join([*parts, *_by_variant(page.part.fields)])


def _by_variant(fields: Sequence[Field]) -> list[str]:
    parts: list[str] = []
    for variant, members in itertools.groupby(fields, key=lambda field: field.variant):
        parts += [f"With `type: {variant}`:", ""] if variant else []
        parts += _keys(list(members))
    return parts


def _programs(programs: Sequence[str]) -> str:
    named = [
        "`fornax host` as the `serving.yaml` of a model" if each == _SERVING else f"`fornax {each}`"
        for each in programs
    ]
    return ", ".join(named)


def _keys(fields: Sequence[Field]) -> list[str]:
    rows = [(f"`{f.path}`", f"`{f.type}`", f"`{f.default}`", f.doc) for f in fields]
    return [*table(("Key", "Type", "Default", "Meaning"), rows), ""] if rows else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Text of a cell; code with a bar is HTML, since Python-Markdown shows an escape in it."""
    bars = {"|": "&#124;", "<": "&lt;", ">": "&gt;", "&": "&amp;"}
    text = re.sub(
        r"`([^`]*\|[^`]*)`",
        lambda code: f"<code>{''.join(bars.get(each, each) for each in code[1])}</code>",
        " ".join(text.split()),
    )
    return text.replace("|", "\\|")
