"""Every recipe loads, and says in its head how it is run."""

from pathlib import Path

import pytest

from fornax.config import load
from fornax.diffusion.config import DiffusionConfig
from fornax.train import TrainConfig

EVERY = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
DIFFUSION = [path for path in EVERY if "fornax diffusion train --config" in path.read_text()]
RECIPES = [path for path in EVERY if "fornax train --config" in path.read_text()]


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_names_its_command(path: Path):
    config = load(TrainConfig, file=path, overrides={})
    assert config.model is not None
    assert config.seq_len <= config.model.max_position_embeddings
    head = path.read_text().split("\n\n")[0]
    assert f"fornax train --config recipes/{path.name}" in head


@pytest.mark.parametrize("path", DIFFUSION, ids=lambda path: path.stem)
def test_a_recipe_of_diffusion_loads_and_names_its_commands(path: Path):
    config = load(DiffusionConfig, file=path, overrides={})
    assert config.sample.guidance == 1 or config.caption_dropout > 0
    head = path.read_text().split("\n\n")[0]
    for command in ("diffusion train", "plan"):
        assert f"fornax {command} --config recipes/{path.name}" in head
