"""Commands that read a config: which words are theirs, and what they print of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from tyro.conf import Positional

from fornax.cli.arguments import parse, split
from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError, from_yaml


@dataclass(frozen=True, kw_only=True)
class Model:
    num_layers: int = 2
    """How deep."""
    tie: bool = False


@dataclass(frozen=True, kw_only=True)
class Root:
    model: Model = field(default_factory=Model)
    steps: int = 10


@dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    run_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Loose:
    source: Positional[Path]
    target: Annotated[Positional[Path], "more"] = Path("out")
    prompt: str = ""
    quiet: bool = False
    seeds: tuple[int, ...] = ()


def read(*words: str) -> Root | None:
    own, rest = split(Arguments, Root, words)
    return read_config(Root, parse(Arguments, own, "fornax fake"), rest)


def test_words_go_to_the_command_or_to_its_config():
    words = ["--steps", "3", "--config=a.yaml", "--model.tie", "loose", "--run-dir", "x"]
    assert split(Arguments, Root, [*words, "--no-model.tie"]) == (
        ["--config=a.yaml", "loose", "--run-dir", "x"],
        ["--steps", "3", "--model.tie", "--no-model.tie"],
    )


@pytest.mark.parametrize(("word", "meant"), [("--confg", "--config"), ("--run_dri=x", "--run-dir")])
def test_a_misspelt_flag_of_the_command_is_named(word, meant):
    with pytest.raises(ConfigError, match=f"neither a flag nor a key; did you mean {meant}?"):
        split(Arguments, Root, [word])


def test_a_misspelt_key_is_left_to_the_config():
    with pytest.raises(ConfigError, match=r"num_layers .* did you mean model\.num_layers"):
        read("--num-layers", "4")
    with pytest.raises(ConfigError, match=r"model\.num_layer .* did you mean model\.num_layers"):
        read("--model.num-layer", "4")


def test_the_file_and_the_flags_make_the_config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 20\nmodel: {tie: true}\n")
    config = read("--config", str(file), "--model.num-layers", "4")
    assert config == Root(steps=20, model=Model(num_layers=4, tie=True))


def test_a_file_of_the_run_is_read_where_none_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 20\n")
    assert read_config(Root, Arguments(), ["--model.tie"], file=file) == Root(
        steps=20, model=Model(tie=True)
    )


def test_the_printed_config_loads_back_equal(capsys):
    assert read("--steps", "3", "--model.tie", "--print-config") is None
    assert from_yaml(Root, capsys.readouterr().out) == Root(steps=3, model=Model(tie=True))


def test_the_keys_are_listed_with_type_default_and_meaning(capsys):
    assert read("--help-config") is None
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "--model.num_layers  int  [default 2]"
    assert out[1].strip() == "How deep."
    assert out[-1] == "--steps  int  [default 10]"


def test_the_keys_below_a_prefix_are_listed(capsys):
    assert read("--help-config", "model") is None
    out = capsys.readouterr().out
    assert "--model.tie" in out
    assert "--steps" not in out


def test_a_prefix_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"modl is not a key of Root; did you mean model\?"):
        read("--help-config", "modl")


def test_a_loose_word_is_refused():
    with pytest.raises(ConfigError, match=r"'run\.yaml' is a word too many for fornax fake"):
        read("run.yaml")


class TestPositional:
    """Arguments written without a flag."""

    def test_they_are_filled_in_order(self):
        assert parse(Loose, ["a"], "fornax fake") == Loose(source=Path("a"))
        assert parse(Loose, ["a", "b"], "fornax fake") == Loose(source=Path("a"), target=Path("b"))

    def test_they_stand_beside_flags(self):
        words = ["--quiet", "a", "--prompt", "two words", "b"]
        assert parse(Loose, words, "fornax fake") == Loose(
            source=Path("a"), target=Path("b"), prompt="two words", quiet=True
        )

    def test_a_flag_may_fill_one(self):
        assert parse(Loose, ["--source", "a"], "fornax fake").source == Path("a")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "fornax fake needs SOURCE; see fornax fake --help"),
            (["a", "b", "c"], "'c' is a word too many for fornax fake, which takes SOURCE TARGET"),
            (["a", "--source=b"], "SOURCE is given twice, as b and a"),
            (["a", "--promt", "x"], "--promt is not a flag of fornax fake; did you mean --prompt?"),
            (["a", "--prompt.x", "y"], "prompt"),
            (["a", "--seeds", "1", "x"], "seeds.1=x .* this key takes an integer"),
        ],
    )
    def test_what_does_not_fit_is_named(self, words, message):
        with pytest.raises(ConfigError, match=message):
            parse(Loose, words, "fornax fake")
