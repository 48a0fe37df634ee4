"""`fornax schema`, and the schemas that recipes name."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from fornax.cli.commands.schema import configs
from fornax.cli.main import main
from fornax.config import json_schema
from fornax.config.text import read_yaml

RECIPES = Path(__file__).parents[3] / "recipes"
_LINE = re.compile(r"^# yaml-language-server: \$schema=(schema/(.+)\.json)$", re.MULTILINE)


COMMANDS = {
    "train": 5,
    "diffusion train": 5,
    "tune sft": 4,
    "tune dpo": 2,
    "tune grpo": 2,
    "tune distill": 1,
    "serve": 2,
    "host": 1,
}
"""Of those with recipes, how many at least."""


@pytest.mark.parametrize("command", COMMANDS)
def test_recipes_name_a_schema_that_is_the_configs_and_holds_for_them(command, capsys):
    file = RECIPES / "schema" / f"{command.replace(' ', '-')}.json"
    assert main(["schema", *command.split()]) == 0
    text = capsys.readouterr().out
    fix = f"run: fornax schema {command} --out {file.relative_to(RECIPES.parent)}"
    assert text == file.read_text(encoding="utf-8"), fix
    validator = jsonschema.Draft7Validator(json.loads(text))
    checked = 0
    for recipe in sorted(RECIPES.glob("*.yaml")):
        text = recipe.read_text(encoding="utf-8")
        found = _LINE.search(text)
        assert found, f"{recipe.name} names no schema"
        if RECIPES / found[1] == file:
            validator.validate(read_yaml(text, recipe.name)[0])
            checked += 1
    assert checked >= COMMANDS[command]


@pytest.mark.parametrize("name", sorted(configs()))
def test_every_config_has_a_schema(name):
    jsonschema.Draft7Validator.check_schema(json_schema(configs()[name][1]()))


def test_list_and_mistakes(capsys, tmp_path):
    assert main(["schema"]) == 0
    listed = capsys.readouterr().out
    assert "\ntune grpo " in listed
    assert "serving.yaml" in listed
    for words, said in (
        (["trian"], "did you mean train?"),
        (["doctor"], "reads no config"),
        (["--out", "x.json"], "needs a command"),
        (["train", "--out", str(tmp_path / "no" / "x.json")], "check the path"),
    ):
        assert main(["schema", *words]) == 2
        assert said in capsys.readouterr().err
