"""Recipes of tuning, serving and hosting: each is read by the command that its head names."""

import re
import shlex
from pathlib import Path

import pytest
from tests.unit.tune.tiny import save_model

from fornax.cli.main import main
from fornax.config.text import read_yaml

RECIPES = Path(__file__).parents[3] / "recipes"
_LINE = re.compile(
    r"^#   (fornax (?:plan )?(?:tune|serve|host)\b(?:[^\\\n]|\\\n#)*)$", re.MULTILINE
)


def lines_of(path: Path) -> list[list[str]]:
    """The commands of a recipe's head, as words."""
    found = _LINE.findall(path.read_text(encoding="utf-8"))
    return [shlex.split(line.replace("\\\n#", " ")) for line in found]


LINES = [
    pytest.param(path, words, id=f"{path.stem}: {words[1]}")
    for path in sorted(RECIPES.glob("*.yaml"))
    for words in lines_of(path)
    if "--config" in words
]


@pytest.mark.parametrize(("path", "words"), LINES)
def test_a_recipe_is_read_by_the_commands_of_its_head(path: Path, words: list[str], capsys):
    assert words[words.index("--config") + 1] == f"recipes/{path.name}"
    words = [str(path) if word.startswith("recipes/") else word for word in words[1:]]
    assert main([*words, "--print-config"]) == 0
    resolved, _ = read_yaml(capsys.readouterr().out, "resolved")
    given, _ = read_yaml(path.read_text(encoding="utf-8"), path.name)
    assert resolved.keys() >= given.keys()


def test_every_command_has_a_recipe_to_run_here():
    lines = [words for path in RECIPES.glob("*.yaml") for words in lines_of(path)]
    commands = {" ".join(words[1:]) for words in lines}
    for start in ("tune sft", "tune dpo", "tune grpo", "tune distill", "serve", "host"):
        assert any(command.startswith(start) for command in commands), start


@pytest.mark.exhaustive
def test_the_recipe_of_preferences_runs_to_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "model", max_position_embeddings=256)
    assert main(["init", "dpo"]) == 0  # writes the pairs that it reads
    words = ["--config", str(RECIPES / "dpo.yaml"), "--model", str(model), "--steps", "2"]
    assert main(["tune", "dpo", *words, "--doctor", "False", "--out", "runs/dpo"]) == 0
    assert (tmp_path / "runs" / "dpo" / "checkpoints" / "2").is_dir()
