"""Advice names changes that do fit, of different kinds, cheapest first, and how to ask for them."""

import dataclasses
import shlex

import pytest

from fornax.config import load, to_mapping
from fornax.plan.advice import advise
from fornax.plan.cost.estimate import estimate
from fornax.plan.recipes import find_recipes
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

RECIPES = {recipe.name: recipe for recipe in find_recipes()}
CASES = [
    ("qwen3-8b", "v5e:8x8"),
    ("llama3-8b", "v6e:8x8"),
    ("llama3-70b", "v5p:4x4x4"),
    ("qwen3-8b", "h100:8"),
    ("gemma3-4b", "v5e:4x4"),
]


@pytest.mark.parametrize(("recipe", "chips"), CASES)
def test_what_is_advised_fits_when_its_flags_are_given(recipe: str, chips: str):
    config, topology = RECIPES[recipe].config(), parse_topology(chips)
    assert not estimate(config, topology).memory.fits
    advice = advise(config, topology)
    assert advice
    for one in advice:
        words = shlex.split(one.flags)
        where = topology
        if words[0] == "--topology":
            where, words = parse_topology(words[1]), words[2:]
        changed = load(TrainConfig, file=RECIPES[recipe].path, overrides=words)
        seen = estimate(changed, where)
        assert seen.memory.fits
        assert seen.memory.total == one.total_bytes
        assert seen.step_seconds == one.step_seconds


def test_the_cheapest_comes_first_and_kinds_differ():
    advice = advise(RECIPES["qwen3-8b"].config(), parse_topology("v5e:8x8"))
    assert len(advice) == 3
    assert advice[0].step_seconds <= advice[1].step_seconds
    assert len({one.flags.split()[0] for one in advice[:2]}) == 2


def test_more_micro_batches_that_save_nothing_are_no_advice():
    """From eight on, a device holds one row of 512 over 64 devices, however many there are."""
    advice = advise(RECIPES["llama3-70b"].config(), parse_topology("v6e:8x8"))
    split = [int(one.flags.split()[1]) for one in advice if one.flags.startswith("--accumulate")]
    assert split
    assert max(split) == 8


def test_where_one_change_is_not_enough_two_are_named():
    advice = advise(RECIPES["llama3-8b"].config(), parse_topology("v5e:4x4"))
    assert advice
    assert all(one.flags.count("--") >= 2 for one in advice)


def test_a_compiler_that_needs_more_than_the_estimate_is_heeded():
    config, topology = RECIPES["qwen3-8b"].config(), parse_topology("v5e:8x8")
    for one in advise(config, topology, scale=1.3):
        assert one.total_bytes <= topology.chip.usable_bytes
    plain = {one.flags for one in advise(config, topology)}
    assert {one.flags for one in advise(config, topology, scale=1.3)} != plain


def test_a_slice_that_is_too_small_for_the_state_is_answered_with_a_larger_one():
    config = dataclasses.replace(RECIPES["llama3-8b"].config(), batch_size=64, accumulate=1)
    advice = advise(config, parse_topology("v5e:2x2"))
    assert [one for one in advice if one.flags.startswith("--topology v5e:")]
    assert to_mapping(config)["batch_size"] == 64
