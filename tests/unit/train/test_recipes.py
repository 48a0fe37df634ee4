"""Every recipe loads, and says in its head how it is run."""

from pathlib import Path

import pytest

from fornax.config import load
from fornax.train import TrainConfig

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_names_its_command(path: Path):
    config = load(TrainConfig, file=path, overrides={})
    assert config.model is not None
    assert config.seq_len <= config.model.max_position_embeddings
    head = path.read_text().split("\n\n")[0]
    assert f"fornax train --config recipes/{path.name}" in head
