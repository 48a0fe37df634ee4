"""Recipes' training steps by the TPU's compiler: `recipes/compiled.json`, for the recipes' page.

    python benchmarks/recipes_compiled.py                 # what was not compiled, or has changed
    python benchmarks/recipes_compiled.py --recipes mixtral-8x7b --chips v5p

Needs libtpu (the extra `tpu`) and no TPU. A step takes minutes, the largest the better part of an
hour; each is kept as soon as it is made, so that the rest can wait for another day.
"""

import argparse
import time

from fornax.config import FornaxError
from fornax.plan.recipes import compiled_recipes, find_recipes, keep_compiled, program_key
from fornax.plan.topology import parse_topology
from fornax.plan.train import plan_train


def main() -> None:
    recipes = {recipe.name: recipe for recipe in find_recipes()}
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
                plan = plan_train(recipe.config(), topology, programs=("train_step",))
            except FornaxError as error:
                print(f"{recipe.name} on {name}: {error}", flush=True)
                continue
            now = keep_compiled(recipe, topology, plan)
            print(
                f"{recipe.name} on {name}: {time.monotonic() - begun:.0f} s, "
                f"{now.memory_bytes / 2**30:.1f} GiB{'' if now.fits else ' (does not fit)'}, "
                f"step {now.step_seconds:.2f} s, MFU {now.mfu:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
