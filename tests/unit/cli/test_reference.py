"""Reference pages: every command, key and variable that the code has."""

import dataclasses
import re

import pytest

from fornax.cli import reference
from fornax.cli.main import main as fornax
from fornax.config import describe
from fornax.config.environment import documented
from fornax.data import BuildConfig
from fornax.llm import SamplingParams
from fornax.llm.sampling_params import REFUSED
from fornax.train import TrainConfig


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return {path.name: path.read_text() for path in reference.write_reference(folder)}


@pytest.mark.slow
def test_every_command_stands_with_its_example(pages, capsys):
    fornax(["--help"])
    for name in re.findall(r"^  (\w+)  ", capsys.readouterr().out, re.MULTILINE):
        assert f"## fornax {name}" in pages["cli.md"]
    assert "fornax quickstart --size tiny" in pages["cli.md"]
    assert "| `--run-dir` |" in pages["cli.md"]


def test_every_variable_stands(pages):
    assert all(f"| `{name}` |" in pages["cli.md"] for name in documented())


@pytest.mark.parametrize("config", [TrainConfig, BuildConfig])
def test_every_key_stands(pages, config):
    page = pages["config.md"]
    assert f"## {config.__name__}\n" in page
    assert all(f"| `{field.path}` |" in page for field in describe(config))


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
    for anchor in re.findall(r"\(config\.md#(\w+)\)", pages["cli.md"]):
        assert anchor in {
            head.lower() for head in re.findall(r"^## (\w+)$", pages["config.md"], re.M)
        }


def test_the_folder_must_be_named(capsys):
    assert reference.main([]) == 2
    assert capsys.readouterr().err == "usage: python -m fornax.cli.reference DIRECTORY\n"
