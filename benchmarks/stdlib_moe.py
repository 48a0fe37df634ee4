"""Experts beside a dense model of equal active parameters: `python benchmarks/stdlib_moe.py`.

    fornax data build --output data/stdlib --tokenizer.vocab-size 4096 --holdout 0.05
    python benchmarks/stdlib_moe.py --runs runs/experts

`recipes/stdlib-moe.yaml` and `recipes/stdlib.yaml` are trained by `fornax train`, with as many
tokens of the same records in the same order, once for each seed. A run that is done is not made
again, so that the command resumes where it was stopped.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from _curves import picture
from _harness import machine, table, versions, write_results
from fornax.config.jsonl import read_json_lines

RECIPES = Path(__file__).parents[1] / "recipes"
CONTESTANTS = {"dense": "stdlib", "experts": "stdlib-moe"}
EVERY = 125


def trained(runs: Path, name: str, seed: int, steps: int) -> list[dict[str, float]]:
    """The evaluations of one run, which is made unless it is there."""
    run_dir = runs / f"{name}-{seed}"

    def found() -> list[dict[str, float]]:
        lines = read_json_lines(run_dir / "metrics.jsonl") if run_dir.exists() else []
        return [line for line in lines if "eval/bits_per_byte" in line]

    if not any(line["step"] == steps for line in found()):
        words = ["train", "--config", str(RECIPES / f"{CONTESTANTS[name]}.yaml")]
        words += ["--run-dir", str(run_dir), "--seed", str(seed), "--steps", str(steps)]
        words += ["--eval.every", str(EVERY), "--progress", "lines", "--log.no-tensorboard"]
        subprocess.run([sys.executable, "-m", "fornax", *words], check=True)
    return found()


def minutes(runs: Path, name: str, seed: int) -> float:
    """From the first step to the last."""
    lines = read_json_lines(runs / f"{name}-{seed}" / "metrics.jsonl")
    return (lines[-1]["time"] - lines[0]["time"]) / 60


def main() -> None:
    """Train, compare, and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/experts"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", type=Path, help="where the curves go, as SVG")
    args = parser.parse_args()
    rows, curves = [], {}
    for seed in args.seeds:
        at_end = {}
        for name in CONTESTANTS:
            found = trained(args.runs, name, seed, args.steps)
            curves[f"{name}, seed {seed}"] = [
                (int(line["step"]), line["eval/bits_per_byte"]) for line in found
            ]
            at_end[name] = found[-1]["eval/bits_per_byte"]
        took = [f"{minutes(args.runs, name, seed):.1f}" for name in CONTESTANTS]
        difference = at_end["experts"] / at_end["dense"] - 1
        bits = [f"{at_end[name]:.4f}" for name in CONTESTANTS]
        rows.append([seed, *bits, f"{100 * difference:+.1f} %", *took])
    differences = [float(row[3].split()[0]) for row in rows]
    head = ("seed", "dense, bits/byte", "experts, bits/byte", "difference", "dense, minutes")
    text = "\n".join(
        [
            "# Experts beside a dense model of equal active parameters",
            "",
            f"{machine()}; {versions('jax')}. {args.steps} steps of 8 rows of 512 tokens, held-out "
            "text of the standard library. Minutes are of a shared machine.",
            "",
            table((*head, "experts, minutes"), rows),
            "",
            f"In the median {statistics.median(differences):+.1f} %.",
            "",
        ]
    )
    print(text)
    write_results("stdlib_moe", text)
    if args.picture:
        title = "Bits per byte of held-out text by step, experts and a dense model"
        args.picture.write_text(picture(title, curves))


if __name__ == "__main__":
    main()
