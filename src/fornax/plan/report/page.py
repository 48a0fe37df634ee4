"""A report as one self-contained page, in the look of the other reports of Fornax."""

from pathlib import Path

from markupsafe import Markup

from fornax.config import ConfigError
from fornax.pages import Section as PageSection
from fornax.pages import bullets, render, table
from fornax.plan.report.charts import memory_picture
from fornax.plan.report.document import Block, Chart, Document, Lines, MemoryChart, Section, Table


def write_document(document: Document, path: Path) -> Path:
    """Write the page to `path`; it fetches nothing.

    Raises:
      ConfigError: when the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder of {path}: {error.strerror or error}; name another file"
        ) from error
    verdicts = " ".join(f"{line[0].upper()}{line[1:]}." for line in document.verdicts)
    leads = [verdicts, *(section.lead for section in document.sections[1:])]
    return render(
        path,
        title=document.page_title,
        subtitle=document.subtitle,
        figures=document.figures,
        sections=[
            PageSection(title=section.title, lead=lead, body=_body(section))
            for section, lead in zip(document.sections, leads, strict=True)
        ],
    )


def _body(section: Section) -> Markup:
    body = Markup()
    for block in section.blocks:
        if block.medium != "terminal":
            body += Markup("<h3>{}</h3>").format(block.title) if block.title else ""
            body += _block(block)
    return body


def _block(block: Block) -> Markup:
    match block:
        case Table():
            return _table(block)
        case Lines():
            return bullets(block.lines)
        case MemoryChart():
            return memory_picture(block)
        case Chart():
            return block.draw()


def _table(block: Table) -> Markup:
    shown = [i for i, column in enumerate(block.columns) if column.medium != "terminal"]
    made = table(
        [block.columns[i].title for i in shown], [[row[i] for i in shown] for row in block.rows]
    )
    if not block.fold:
        return made
    return Markup("<details><summary>{}</summary>{}</details>").format(block.fold, made)
