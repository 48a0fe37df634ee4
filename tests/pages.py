"""Command blocks of documentation pages, and the commands of Fornax in them.

A block that begins with ```sh (or ```bash) is commands; one without a language is where a line
begins with `fornax`. The line before may be a comment that says how the tests treat it:

    <!-- skip: REASON -->   it is parsed and not run; REASON is one of `REASONS`
    <!-- exit: CODE -->     its last command ends with this code
    <!-- ready: URL -->     its last command is a server, which is up once the URL answers with 200
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = frozenset(
    DOCS / "reference" / name
    for name in ("cli", "config", "kernels", "quantized", "recipes", "requests", "stability")
)
"""Pages, without `.md`, and folders of pages that `make docs` writes and git ignores: they may be
missing here, or old."""


def is_generated(page: Path) -> bool:
    """Whether `make docs` writes a page."""
    return page.with_suffix("") in GENERATED or page.parent in GENERATED


WRITTEN = sorted(page for page in DOCS.rglob("*.md") if not is_generated(page))
"""The other pages."""
REASONS = {
    "needs a GPU",
    "needs a TPU VM",
    "needs the TPU compiler",
    "needs the network",
    "needs Docker",
    "needs files of yours",
    "takes minutes",
    "has a test of its own",
    "changes this environment",
    "opens a port to other machines",
}
"""Why a block is not run by the tests."""
_FENCE = re.compile(
    r"(?:^<!-- (skip|exit|ready): ([^\n]*) -->\n)?^```(\S*)[ ]*([^\n]*)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'(title)="([^"]*)"')
_LEADS = {"do", "then", "else", "time", "exec", "!"}


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str

    @property
    def is_commands(self) -> bool:
        """Whether it is meant to be typed."""
        if self.language == "":
            return re.search(r"^([A-Z_]+=\S+ )*fornax ", self.text, re.MULTILINE) is not None
        return self.language in ("sh", "bash")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page.name,
            line=text.count("\n", 0, found.start()) + 1,
            language=found[3],
            options=dict([*_TITLE.findall(found[4]), *([found.group(1, 2)] if found[1] else [])]),
            text=found[5],
        )
        for found in _FENCE.finditer(text)
    ]


def fornax_commands(script: str) -> Iterator[list[str]]:
    """The words after `fornax` of each of its commands in a script for a shell.

    Comments, redirections, variables set before a command and text for its input are left out.
    """
    script = re.sub(r"<<'(\w+)'\n.*?^\1$", "\n", script, flags=re.MULTILINE | re.DOTALL)
    script = re.sub(r'"\$\(([^)]*)\)"|<\(([^)]*)\)', r"; \1\2 ;", script)
    for command in _simple_commands(script.replace("\\\n", " ")):
        words = list(command)
        while words and (words[0] in _LEADS or re.match(r"[A-Za-z_]\w*=", words[0])):
            words.pop(0)
        if words and words[0] == "fornax":
            yield words[1:]


def _simple_commands(script: str) -> Iterator[list[str]]:
    # A comment takes the end of its line along, so that the next line begins with a separator.
    lexer = shlex.shlex(script.replace("\n", "\n; "), posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in lexer:
        if set(word) <= {*";&|()"}:
            yield words
            words = []
        elif set(word) <= {*"<>&"}:
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(word)
    yield words
