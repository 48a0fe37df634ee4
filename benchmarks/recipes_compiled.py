"""Recipes' training steps by the TPU's compiler: `recipes/compiled.json`, for the recipes' page.

    python benchmarks/recipes_compiled.py                 # what was not compiled, or has changed
    python benchmarks/recipes_compiled.py --recipes mixtral-8x7b flux-dev --chips v5p

Needs libtpu (the extra `tpu`) and no TPU. A step takes minutes, the largest the better part of an
hour; each is kept as soon as it is made, so that the rest can wait for another day.
"""

import argparse
import time

from fornax.config import FornaxError
from fornax.plan.cost.compiled import compiled_denoiser
from fornax.plan.diffusion import plan_diffusion
from fornax.plan.facts import ProgramReport
from fornax.plan.recipes import (
    DenoiserRecipe,
    Recipe,
    compiled_recipes,
    find_denoiser_recipes,
    find_recipes,
    keep_compiled,
    program_key,
)
from fornax.plan.topology import Topology, parse_topology
from fornax.plan.train import plan_train


def main() -> None:
    recipes = {recipe.name: recipe for recipe in (*find_recipes(), *find_denoiser_recipes())}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(recipes), choices=recipes)
    parser.add_argument("--chips", nargs="+", help="such as v5p tpu7x; all by default")
    parser.add_argument("--again", action="store_true", help="those that are kept as well")
    args = parser.parse_args()
    kept = compiled_recipes()
    for recipe in (recipes[name] for name in args.recipes):
        for name in recipe.topologies:
            topology = parse_topology(name)
            if topology.chip.platform != "tpu":
                continue
            if args.chips and topology.chip.name not in args.chips:
                continue
            found = kept.get((recipe.name, name))
            if found and found.key == program_key(recipe, topology) and not args.again:
                continue
            begun = time.monotonic()
            try:
                program, mfu = compiled(recipe, topology)
            except FornaxError as error:
                print(f"{recipe.name} on {name}: {error}", flush=True)
                continue
            now = keep_compiled(recipe, topology, program, mfu)
            print(
                f"{recipe.name} on {name}: {time.monotonic() - begun:.0f} s, "
                f"{now.memory_bytes / 2**30:.1f} GiB{'' if now.fits else ' (does not fit)'}, "
                f"step {now.step_seconds:.2f} s, MFU {now.mfu:.1%}",
                *program.notes,
                sep="\n  ",
                flush=True,
            )


def compiled(recipe: Recipe | DenoiserRecipe, topology: Topology) -> tuple[ProgramReport, float]:
    """The compiled step, and the model's FLOPs over what the chips could do in its time."""
    if isinstance(recipe, Recipe):
        plan = plan_train(recipe.config(), topology, programs=("train_step",))
        assert plan.speed is not None
        return plan.main, plan.speed.mfu
    program = compiled_denoiser(recipe.config(), topology)
    plan = plan_diffusion(recipe.config(), topology)
    peak = plan.hardware.chips * plan.hardware.peak_flops * program.step_seconds
    assert plan.run is not None
    return program, plan.run.model_flops / peak


if __name__ == "__main__":
    main()
