"""The frame of a page: sections of trusted HTML, laid into one self-contained page."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fornax.config.errors import ConfigError
from fornax.config.files import write_whole

__all__ = ["STATIC", "Section", "bullets", "fill", "render", "table"]

STATIC = Path(str(resources.files("fornax.pages"))) / "static"
"""Styles, modules and vendored libraries that all pages share."""

_NUMBER = re.compile(r"[-+<]?\d|—$")
_LONG_WORD = re.compile(r"\S{33}")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page."""

    title: str
    """The heading; plain text."""
    lead: str = ""
    """One or two sentences under the heading; plain text."""
    body: Markup = dataclasses.field(default_factory=Markup)
    """HTML that is already safe: made by `table`, `lines`, `bars`, or escaped by the caller."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """An HTML table; every cell is escaped, and columns that hold numbers align right.

    Words too long for a column, such as paths, break anywhere.
    """
    body = [[str(cell) for cell in row] for row in rows]
    numeric = [
        bool(body) and all(_NUMBER.match(row[column]) for row in body)
        for column in range(len(head))
    ]
    align = [' class="n"' if is_number else "" for is_number in numeric]
    out = ["<table><thead><tr>"]
    out += [f"<th{a}>{escape(cell)}</th>" for a, cell in zip(align, head, strict=True)]
    out.append("</tr></thead><tbody>")
    for row in body:
        out.append("<tr>")
        for cell, right in zip(row, align, strict=True):
            breaks = ' class="w"' if _LONG_WORD.search(cell) else right
            out.append(f"<td{breaks}>{escape(cell)}</td>")
        out.append("</tr>")
    out.append("</tbody></table>")
    return Markup("".join(out))


def bullets(lines: Iterable[str]) -> Markup:
    """An HTML list; every line is escaped."""
    items = Markup("").join(Markup("<li>{}</li>").format(line) for line in lines)
    return Markup("<ul>{}</ul>").format(items)


def fill(template: str, *, package: str = "fornax.pages", **values: object) -> Markup:
    """A template in a package's folder with its values, escaped where they are plain text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return Markup(environment.get_template(template).render(**values))


def render(
    path: Path,
    *,
    title: str,
    subtitle: str,
    figures: Sequence[tuple[str, str]],
    sections: Sequence[Section],
) -> Path:
    """Write the page to `path` in one atomic replacement.

    Args:
      path: the HTML file.
      title: the heading of the page.
      subtitle: one line under it.
      figures: the run at a glance: (label, value) pairs.
      sections: what follows.

    Raises:
      ConfigError: when the file cannot be written.
    """
    theme = Markup((STATIC / "theme.css").read_text(encoding="utf-8"))
    text = fill(
        "page.html.j2",
        title=title,
        subtitle=subtitle,
        figures=figures,
        sections=sections,
        theme=theme,
    )
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            f"cannot write the report {path}: {error.strerror or error}; make room or make it "
            "writable, then run the same command again"
        ) from error
    return path
