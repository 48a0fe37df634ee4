"""Every recipe loads, says what it is planned for, divides over it and fits it by estimate."""

import dataclasses

import pytest

from fornax.models.families import family_by_name
from fornax.plan.cost.estimate import estimate
from fornax.plan.diffusion import plan_diffusion
from fornax.plan.recipes import (
    DenoiserRecipe,
    Recipe,
    ServeRecipe,
    TuneRecipe,
    compiled_recipes,
    find_denoiser_recipes,
    find_recipes,
    find_serve_recipes,
    find_tune_recipes,
    program_key,
)
from fornax.plan.recipes_page import recipes_page
from fornax.plan.topology import parse_topology
from fornax.train.hosts import data_shards

RECIPES = find_recipes()
DENOISERS = find_denoiser_recipes()
TUNED = find_tune_recipes()
SERVED = find_serve_recipes()
MODELS = ("llama3-8b", "llama3-8b-128k", "llama3-8b-1m", "llama3-70b",
          "llama3-405b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b",
          "gemma3-4b", "gemma3-27b", "mixtral-8x7b", "qwen3-30b-a3b",
          "deepseek-v2-lite", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-20b",
          "gpt-oss-120b", "qwen3-next-80b-a3b")  # fmt: skip
CHIPS = ("v5e", "v5p", "v6e", "tpu7x", "h100")
MISSING = {
    "llama3-8b-128k": ("v5e", "v6e", "h100"), "llama3-8b-1m": ("v5e", "v6e", "h100"),
    "llama3-405b": ("v5e",), "mixtral-8x7b": ("v5e",), "qwen3-235b-a22b": ("v5e",),
    "gpt-oss-20b": ("v5e",), "gpt-oss-120b": ("v5e",), "deepseek-v3": ("v5e", "v6e"),
    "qwen3-next-80b-a3b": ("v5e", "v6e", "tpu7x", "h100"),
}  # fmt: skip
"""Chips on which the model does not fit, or not in a sensible number, or is not planned."""
PAIRS = [(recipe, name) for recipe in RECIPES for name in recipe.topologies]
BILLIONS = {
    "llama3-8b": 8.03, "llama3-8b-128k": 8.03, "llama3-8b-1m": 8.03,
    "llama3-70b": 70.55, "llama3-405b": 405.85, "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19, "qwen3-32b": 32.76, "gemma3-4b": 3.88, "gemma3-27b": 27.01,
    "mixtral-8x7b": 46.70, "qwen3-30b-a3b": 30.53, "deepseek-v2-lite": 15.71,
    "deepseek-v3": 671.03, "qwen3-235b-a22b": 235.09, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    "qwen3-next-80b-a3b": 79.67,
}  # fmt: skip


def model_of(recipe: Recipe) -> str:
    """The base recipe's name."""
    return next(name for name in sorted(MODELS, key=len, reverse=True) if recipe.name in (name,)
                or recipe.name.startswith(f"{name}."))  # fmt: skip


@pytest.mark.parametrize(("recipe", "name"), PAIRS, ids=lambda x: getattr(x, "name", x))
def test_a_recipe_fits_its_chips_with_room_to_spare(recipe: Recipe, name: str):
    topology = parse_topology(name)
    config = recipe.config()
    seen = estimate(config, topology)
    assert seen.memory.total < 0.9 * seen.memory.usable
    sizes = config.mesh.resolved_sizes(topology.num_devices)
    readers = min(topology.num_hosts, data_shards(sizes, config.mesh.resolved_rules()))
    assert config.data.virtual_shards % readers == 0
    assert config.batch_size % config.data.virtual_shards == 0


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_recipe_for_every_kind_of_chip(model: str):
    chips = {
        parse_topology(name).chip.name
        for recipe, name in PAIRS
        if model_of(recipe) == model
    }  # fmt: skip
    assert chips == set(CHIPS) - set(MISSING.get(model, ()))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipes_model_is_its_bases(recipe: Recipe):
    base = next(one for one in RECIPES if one.name == model_of(recipe))
    assert recipe.config().model == base.config().model
    assert (
        f"recipes/{recipe.name}.yaml --topology {recipe.topologies[0]}" in recipe.path.read_text()
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_recipes_model_has_the_size_it_is_named_for(model: str):
    from fornax.models import config_from_hf, config_to_hf, num_parameters

    config = next(one for one in RECIPES if one.name == model).config().model
    assert config is not None
    assert num_parameters(config) / 1e9 == pytest.approx(BILLIONS[model], rel=2e-3)
    assert family_by_name(str(config.family)) is not None
    told = config_from_hf(config_to_hf(config))
    same = dataclasses.replace(
        config,
        scale_residual_init=told.scale_residual_init,
        head_dim=None if config.latent else config.head_width,
    )
    assert told == same


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DENOISERS, ids=lambda recipe: recipe.name)
def test_a_denoiser_fits_its_chips(recipe: DenoiserRecipe):
    for name in recipe.topologies:
        memory = plan_diffusion(recipe.config(), parse_topology(name)).main.memory
        assert memory.total < 0.9 * memory.usable


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", TUNED, ids=lambda recipe: recipe.name)
def test_a_recipe_of_tuning_fits_its_chips(recipe: TuneRecipe):
    for name in recipe.topologies:
        for program in recipe.plan(parse_topology(name)).programs:
            assert program.memory.total < 0.9 * program.memory.usable


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SERVED, ids=lambda recipe: recipe.name)
def test_a_recipe_of_serving_fits_its_chips(recipe: ServeRecipe):
    for name in recipe.topologies:
        plan = recipe.plan(parse_topology(name))
        assert plan.memory.total < 0.95 * plan.memory.usable
        assert plan.memory.sequences > 16


@pytest.mark.slow
def test_the_table_has_a_row_for_every_pair():
    page, denoisers, tuned, served, _ = recipes_page().split("\n## ")
    counts = [len(PAIRS)]
    for recipes in (DENOISERS, TUNED, SERVED):
        counts.append(sum(len(recipe.topologies) for recipe in recipes))
    for part, count in zip((page, denoisers, tuned, served), counts, strict=True):
        rows = [line for line in part.splitlines() if line.startswith("| `")]
        assert len(rows) == count
        assert all(row.count("|") == rows[0].count("|") for row in rows)


@pytest.mark.parametrize("found", compiled_recipes().values(), ids=lambda x: x.recipe)
def test_what_was_compiled_is_still_the_recipe(found):
    """`python benchmarks/recipes_compiled.py` compiles a recipe that has changed again."""
    recipe = next(one for one in (*RECIPES, *DENOISERS) if one.name == found.recipe)
    assert found.topology in recipe.topologies
    assert found.key == program_key(recipe, parse_topology(found.topology))
    assert found.fits
