"""Predicted times of diffusion models beside those that MaxDiffusion publishes.

    python benchmarks/plan_diffusion.py [--no-results]

Every row is one recipe's network on the published chips, traced and predicted by the cost model of
all plans (`fornax.plan.diffusion`); nothing runs and nothing is compiled. The first prediction is
fitted to none of these rows: its rates are those that language models gave each chip
(`fornax.hlo.roofline`). The second has one number a chip, the ratio of that chip's first row.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _harness
from fornax.config import load
from fornax.diffusion.config import DiffusionConfig
from fornax.plan.diffusion import plan_diffusion
from fornax.plan.recipes import recipes_folder
from fornax.plan.topology import parse_topology

SOURCE = "https://github.com/AI-Hypercomputer/maxdiffusion (README, November 2026)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure."""

    name: str
    recipe: str
    topology: str
    task: str
    """`train_step` or `sample`."""
    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)
    """To the recipe's config."""
    sample: dict[str, Any] = field(default_factory=dict)
    """To how it samples."""
    rows: int = 1
    """Sampled at once; under guidance twice as many."""


ROWS = (
    Row(
        name="Wan 2.1 14B, 720p x 81, batch 1",
        recipe="wan2.1-14b",
        topology="v5p:2x2x1",
        task="train_step",
        seconds=36.0,
    ),
    Row(
        name="Flux-dev, 1024 x 1024, batch 8",
        recipe="flux-dev",
        topology="v5p:2x2x1",
        task="train_step",
        seconds=1.769,
    ),
    Row(
        name="Flux-dev, 1024 x 1024, batch 8, without recomputation",
        recipe="flux-dev",
        topology="v5p:2x2x1",
        task="train_step",
        seconds=1.769,
        changes={"remat": "none"},
    ),
    Row(
        name="Flux-dev, 4 images, 28 steps",
        recipe="flux-dev",
        topology="v6e:2x2",
        task="sample",
        seconds=5.5,
        rows=4,
    ),
    Row(
        name="Flux-schnell, 4 images, 4 steps",
        recipe="flux-dev",
        topology="v6e:2x2",
        task="sample",
        seconds=0.8,
        sample={"steps": 4},
        rows=4,
    ),
    Row(
        name="Wan 2.1 14B, 720p x 81, 50 steps",
        recipe="wan2.1-14b",
        topology="tpu7x:2x2x1",
        task="sample",
        seconds=249.3,
        rows=2,
    ),
    Row(
        name="Wan 2.2, 720p x 81, 40 steps",
        recipe="wan2.1-14b",
        topology="tpu7x:2x2x1",
        task="sample",
        seconds=194.4,
        sample={"steps": 40},
        rows=2,
    ),
)


def predicted(row: Row) -> tuple[float, float, str]:
    """Seconds, GiB of a chip, and the shares of the chip's peaks that were assumed."""
    config = load(DiffusionConfig, file=Path(recipes_folder() / f"{row.recipe}.yaml"))
    topology = parse_topology(row.topology)
    if config.mesh.context > 1:  # the length over all devices
        mesh = dataclasses.replace(config.mesh, context=topology.num_devices)
        config = dataclasses.replace(config, mesh=mesh)
    sample = dataclasses.replace(config.sample, **row.sample)
    config = dataclasses.replace(config, sample=sample, **row.changes)
    plan = plan_diffusion(config, topology, name=row.recipe, rows=row.rows)
    program = next(one for one in plan.programs if one.name == row.task)
    return program.step_seconds, program.memory.total / 2**30, program.bound


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    args = parser.parse_args()
    rows: list[list[str]] = []
    factors: dict[str, float] = {}
    for row in ROWS:
        seconds, memory, bound = predicted(row)
        fitted = row.topology not in factors
        factor = factors.setdefault(row.topology, row.seconds / seconds)
        again = factor * seconds / row.seconds - 1
        rows.append(
            [
                f"{row.name}, {'training' if row.task == 'train_step' else 'sampling'}",
                row.topology,
                f"{row.seconds:g}",
                f"{seconds:.3g}",
                f"{seconds / row.seconds - 1:+.0%}",
                "fitted" if fitted else f"{again:+.0%}",
                f"{memory:.1f}",
                bound,
            ]
        )
        print(rows[-1], flush=True)
    head = [
        "",
        "chips",
        "published s",
        "predicted s",
        "error",
        "one number a chip",
        "GiB a chip",
        "bound",
    ]
    text = "\n\n".join(
        [
            "# Predicted times of diffusion models beside published ones",
            f"Published: {SOURCE}. Predicted: `fornax.plan.diffusion`, from the traced programs of "
            "Fornax's own networks; nothing ran here. Errors are of the prediction with the rates "
            "that language models gave each chip, and of it times one number a chip, the ratio of "
            "that chip's first row. Sampling is predicted without text encoders and autoencoder, "
            "and published with them. What MaxDiffusion's training recomputes is not published: "
            "Flux stands here with all blocks computed again, and with nothing, which would not "
            "fit.",
            _harness.table(head, rows),
        ]
    )
    if args.no_results:
        print(text)
    else:
        print(_harness.write_results("plan_diffusion", text))


if __name__ == "__main__":
    main()
