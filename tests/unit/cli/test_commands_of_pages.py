"""Every command of Fornax on a page is one that its parser and its config's reader take."""

from itertools import pairwise
from pathlib import Path

import pytest
from tests.pages import ROOT, WRITTEN, blocks, fornax_commands

from fornax.cli import main
from fornax.cli.arguments import parse
from fornax.cli.registry import ROOT as COMMANDS
from fornax.config import describe
from fornax.config.schema import keys_of

SHOW = "--print-config"
PAGES = [ROOT / "README.md", *WRITTEN]


def _files_of(page: Path, folder: Path) -> None:
    """Write the page's own YAML files, those whose first line is a comment with their name."""
    for block in blocks(page):
        name = block.text.partition("\n")[0].removeprefix("# ").split(" ")[0]
        if block.language == "yaml" and name.endswith(".yaml"):
            (folder / name).write_text(block.text, encoding="utf-8")


@pytest.fixture
def accept(monkeypatch, tmp_path):
    """A function that raises what a command line would whose words come after `fornax`.

    A command that reads a config is run with --print-config, so that its own reading is tested;
    of others the arguments are parsed.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    real = main._call

    def call(command, words):
        own, wrapped = _parted(words) if command.wraps else (words, [])
        if command.config is not None:
            _write_configs(words, command.config())
            return real(command, [*(w for w in words if w != SHOW), SHOW])
        if not any(word in ("-h", "--help") for word in words):
            parse(command.load().Arguments, own, f"fornax {command.name}")
        return main._dispatch(COMMANDS, wrapped) if wrapped else 0

    def accepted(words):
        assert main._dispatch(COMMANDS, words) == 0

    monkeypatch.setattr(main, "_call", call)
    return accepted


def _write_configs(words, cls):
    """Write files that a command line names and that are the user's: with required keys alone."""
    required = {"model": "DIR", "data": "FILE", "reward": "[math]"}
    needed = "data" in {each.path for each in describe(cls) if each.default == "required"}
    text = "".join(f"{k}: {v}\n" for k, v in required.items() if needed and k in keys_of(cls))
    for flag, value in pairwise(words):
        file = Path(value, "config.yaml") if flag == "--run-dir" else Path(value)
        if flag in ("--run-dir", "--config") and not file.exists():
            assert not file.is_relative_to("recipes"), f"there is no {file}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def _parted(words):
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_accepted(page, accept, tmp_path):
    _files_of(page, tmp_path)
    for block in blocks(page):
        if block.is_commands:
            for words in fornax_commands(block.text):
                try:
                    accept(words)
                except Exception as error:
                    line = " ".join(words)
                    raise AssertionError(f"{block}: fornax {line}: {error}") from error
