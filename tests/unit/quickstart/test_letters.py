"""The recipe that users copy is the quickstart's own run."""

from fornax.config import load
from fornax.diffusion.config import DiffusionConfig
from fornax.plan.recipes import recipes_folder
from fornax.quickstart.letters.config import SIZES, LettersQuickstartConfig


def test_the_recipe_is_the_run_of_the_quickstart() -> None:
    recipe = load(DiffusionConfig, file=recipes_folder() / "letters.yaml")
    assert recipe == SIZES["small"].train_config(LettersQuickstartConfig())
