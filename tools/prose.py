"""Check the words of documentation, docstrings, comments and messages against `prose.toml`.

    python tools/prose.py [FILE ...]

Without arguments every file that git tracks below the configured paths is read. Each finding is
printed as `file:line: "text found": write ...`; the exit code is 1 when there is one. Of Python
files only comments and strings are read, of all others the whole text. A phrase is found across
line breaks too.
"""

import argparse
import dataclasses
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = Path(__file__).with_name("prose.toml")

# Stands where Python code was: no space, so that two strings with code between are no phrase.
_CODE = "\x00"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `prose.toml`."""

    find: re.Pattern[str]
    write: str
    """What to write instead."""
    allow: Sequence[str] = ()
    """Patterns of paths in which the words are right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All of `prose.toml`."""

    paths: Sequence[str]
    """Patterns of the paths that are checked."""
    skip: Sequence[str]
    """Patterns of paths that are not."""
    rules: Sequence[Rule]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Words that a rule found."""

    path: str
    line: int
    text: str
    write: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.text}": write {self.write}'


def read_rules(path: Path = RULES) -> Config:
    """Return the configuration.

    Raises:
        ValueError: a rule has an unknown key, lacks `find` or `write`, or `find` is no regular
            expression; the message names it.
    """
    raw = tomllib.loads(path.read_text())
    rules = []
    for entry in raw["rule"]:
        unknown = entry.keys() - {"find", "write", "allow"}
        if unknown or not {"find", "write"} <= entry.keys():
            raise ValueError(f"{path}: {entry} needs find and write, and may have allow")
        try:
            found = pattern(entry["find"])
        except re.error as error:
            raise ValueError(f"{path}: find={entry['find']!r}: {error}") from error
        rules.append(Rule(find=found, write=entry["write"], allow=tuple(entry.get("allow", ()))))
    return Config(paths=tuple(raw["paths"]), skip=tuple(raw["skip"]), rules=tuple(rules))


def pattern(find: str) -> re.Pattern[str]:
    """Compile a rule: whole words, any case, a space is any white space."""
    return re.compile(rf"\b(?:{find})(?!\w)".replace(" ", r"\s+"), re.IGNORECASE)


def prose(path: str, text: str) -> str:
    """Return the text with all that is no prose blanked, at unchanged offsets.

    In Python files that is code, quotes, string prefixes and comment signs. Strings that follow one
    another without code between, as in a message over several lines, stay one text.
    """
    if not path.endswith((".py", ".pyi")):
        return text
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kept = [c if c.isspace() else _CODE for c in text]
    for begin, end in _texts(text, starts):
        kept[begin:end] = _unquoted(text[begin:end])
    return "".join(kept)


def _texts(text: str, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offsets at which comments and string literals begin and end."""
    # From Python 3.12 on an f-string is several tokens; its expressions may hold strings.
    opens, closes = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
    depth, begin = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first = starts[token.start[0] - 1] + token.start[1]
        last = starts[token.end[0] - 1] + token.end[1]
        if token.type == opens:
            begin = begin if depth else first
            depth += 1
        elif token.type == closes:
            depth -= 1
            if not depth:
                yield begin, last
        elif not depth and token.type in (tokenize.STRING, tokenize.COMMENT):
            yield first, last


def _unquoted(literal: str) -> str:
    """The literal or comment, its prefix and quotes or its sign blanked."""
    mark = re.match(r"#+:?|[a-zA-Z]*('''|\"\"\"|'|\")", literal)
    if mark is None:
        return literal
    quotes = len(mark[1] or "")
    body = literal[mark.end() : len(literal) - quotes]
    # `\n` in a literal is two characters, of which the second is not a letter of a word
    body = re.sub(r"\\[nt]", "  ", body)
    if "f" in mark[0].lower():
        body = re.sub(r"{[^{}'\"]*}", lambda code: _CODE * len(code[0]), body)
    return " " * mark.end() + body + " " * quotes


def check(path: str, text: str, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Yield what the rules find in a file's text; `path` is relative to the repository."""
    read = prose(path, text)
    for rule in rules:
        if _matches(path, rule.allow):
            continue
        for found in rule.find.finditer(read):
            line = read.count("\n", 0, found.start()) + 1
            words = " ".join(found[0].split())
            yield Finding(path=path, line=line, text=words, write=rule.write)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, p) for p in patterns)


def tracked(root: Path, config: Config) -> Iterator[str]:
    """Yield the paths that are checked, in order, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    for path in sorted(listed.stdout.decode().rstrip("\0").split("\0")):
        present = (root / path).is_file()
        if present and _matches(path, config.paths) and not _matches(path, config.skip):
            yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is found; the exit code."""
    parser = argparse.ArgumentParser(description="Check the words of prose against prose.toml.")
    parser.add_argument("files", nargs="*", type=Path, help="default: all that are configured")
    named = parser.parse_args(arguments).files
    for path in named:
        if not path.is_file() or not path.resolve().is_relative_to(ROOT):
            parser.error(f"{path} is not a file of this repository")
    config = read_rules()
    if named:
        paths = [str(p.resolve().relative_to(ROOT)) for p in named]
    else:
        paths = list(tracked(ROOT, config))
    findings = [f for p in paths for f in check(p, (ROOT / p).read_text(), config.rules)]
    for finding in sorted(findings, key=lambda f: (f.path, f.line)):
        print(finding)
    if findings:
        print(f"{len(findings)} to rewrite; rules and exceptions: tools/prose.toml")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
