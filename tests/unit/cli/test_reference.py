"""Reference pages: every command, key and variable that the code has."""

import dataclasses
import html
import posixpath
import re
from pathlib import Path

import pytest

from fornax.cli import reference
from fornax.cli.commands.schema import configs
from fornax.cli.main import main as fornax
from fornax.config import describe
from fornax.config.environment import documented
from fornax.llm import SamplingParams
from fornax.llm.sampling_params import REFUSED


@pytest.fixture(scope="module")
def pages():
    return reference.reference_pages()


@pytest.mark.slow
def test_every_command_stands_with_its_example(pages, capsys):
    fornax(["--help"])
    for name in re.findall(r"^  (\w+)  ", capsys.readouterr().out, re.MULTILINE):
        assert f"## fornax {name}" in pages["cli.md"]
    assert "fornax quickstart --size tiny" in pages["cli.md"]
    assert "| `--run-dir` |" in pages["cli.md"]


def test_every_variable_stands(pages):
    assert all(f"| `{name}` |" in pages["cli.md"] for name in documented())


def _linked(page, text):
    """Pages that a page links, by their names from the reference's folder."""
    links = re.findall(r"\]\(((?!\.\./\.\.|\.\./guides)[\w./-]+\.md)", text)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links}


def test_every_key_of_a_config_stands_on_its_page_or_on_one_that_it_links(pages):
    for config in {load() for _, load in configs().values()}:
        _check_keys(config, pages)


def _check_keys(config, pages):
    own = next(page for page, text in pages.items() if text.startswith(f"# {config.__name__}\n"))
    assert own in _linked("config.md", pages["config.md"])
    reached = [pages[page] for page in {own, *_linked(own, pages[own])} if page != "config.md"]
    for field in describe(config):
        row = f"| `{field.path}` |"
        found = [line for text in reached for line in text.splitlines() if line.startswith(row)]
        assert found, field.path
        # A part's page has the defaults of its first config, and the config's page what differs.
        default = "`" + " ".join(field.default.split()) + "` |"
        shown = [re.sub(r"</?code>", "`", html.unescape(line)) for line in found]
        assert any(default in line for line in shown), field.path


def test_no_page_of_configs_is_long(pages):
    for page, text in pages.items():
        if page.startswith("config"):
            assert len([word for word in text.split() if word != "|"]) < 4000, page


def test_navigation_lists_the_pages_of_configs(pages):
    text = (Path(__file__).parents[3] / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"reference/(config[\w./-]*\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(page for page in pages if page.startswith("config"))


def test_every_field_of_a_request_stands(pages):
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert all(f"| `{name}` |" in pages["requests.md"] for name in names)
    assert "### `/v1/chat/completions`" in pages["requests.md"]
    assert pages["requests.md"].count("| **Refused**: ") >= len(REFUSED)


def test_every_row_of_a_table_has_as_many_cells_as_its_head(pages):
    for page in pages.values():
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(counts) == 1


def test_links_between_the_pages_hold(pages):
    for page, text in pages.items():
        assert _linked(page, text) <= set(pages)
    assert "config/train.md" in _linked("cli.md", pages["cli.md"])


def test_the_folder_must_be_named(capsys):
    assert reference.main([]) == 2
    assert capsys.readouterr().err == "usage: python -m fornax.cli.reference DIRECTORY\n"
