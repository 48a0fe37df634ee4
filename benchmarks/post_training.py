"""Time post-training steps: Fornax beside TRL on PyTorch and Tunix, each with its own loop.

    python benchmarks/post_training.py                       # both models, all jobs
    python benchmarks/post_training.py --models tiny --jobs grpo --rounds 3

A step is all that a user waits for: reading and laying out examples, forward, backward, update; in
reinforcement also the rollouts and their rewards. Contestants read the same file of texts with the
same tokenizer, the same number of examples a step, weights in float32, and take turns.

TRL runs where the extra `parity` is installed, Tunix in an environment of its own
(`make bench-peers-tunix`).
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import _harness
import _random_llama
import _tuning

HERE = Path(__file__).resolve().parent
JOBS = ("sft", "sft-lora", "dpo", "grpo")
STEPS = {"tiny": {"grpo": 3}, "llama-40m": {"sft": 2, "sft-lora": 2, "dpo": 1, "grpo": 1}}
"""Optimizer steps of a turn: enough that turns take a second or so; otherwise 5."""
EXAMPLES = 400


def _commands(job: _tuning.Job, peers: Path, only: list[str]) -> dict[str, list[str]]:
    pythons = {
        "fornax": sys.executable,
        "trl": sys.executable,
        "tunix": str(peers / "tunix" / "bin" / "python"),
    }
    return {
        name: [python, str(HERE / "peers" / f"tune_{name}.py"), job.dump()]
        for name, python in pythons.items()
        if name in only and Path(python).exists()
    }


def _rows(job: _tuning.Job, model: str, results: dict[str, _harness.Result]) -> list[list[str]]:
    rows = []
    for name, result in results.items():
        if result.absent is not None:
            rows.append([model, job.name, name, f"absent: {result.absent}", "", "", "", ""])
            continue
        peak = max(turn.peak_bytes for turn in result.turns)
        slower, larger = "", ""
        if name != "fornax" and "fornax" in results:
            slower = f"{_harness.ratio(results, name, 'fornax'):.2f}"
            larger = f"{peak / max(turn.peak_bytes for turn in results['fornax'].turns):.2f}"
        rows.append(
            [
                model,
                job.name,
                name,
                f"{result.median_s() / job.steps:.3f}",
                f"{result.best_s() / job.steps:.3f}",
                slower,
                f"{peak / 2**20:.0f}",
                larger,
            ]
        )
    return rows


def main() -> None:
    """Run the jobs and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="tiny,llama-40m")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--only", default="fornax,trl,tunix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--models-dir", type=Path, default=Path(tempfile.gettempdir()) / "models")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    header = ["model", "job", "who", "s a step", "best", "over Fornax", "peak MiB", "over Fornax"]
    rows: list[list[str]] = []
    details: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            path = _random_llama.make(model, args.models_dir)
            for name in args.jobs.split(","):
                steps = STEPS.get(model, {}).get(name, 5)
                job = _tuning.Job(name=name, model=str(path), data="", steps=steps)
                data = _tuning.write_data(Path(folder), path, count=EXAMPLES, job=job)
                job = replace(job, data=str(data))
                commands = _commands(job, args.peers, args.only.split(","))
                results = _harness.contest(commands, rounds=args.rounds, warmups=2)
                rows += _rows(job, model, results)
                details |= {who: str(r.details.get("versions", "")) for who, r in results.items()}
                print(_harness.table(header, rows), flush=True)
    notes = "\n".join(f"- {who}: {said}" for who, said in details.items() if said)
    text = (
        f"# Post-training steps\n\n{_harness.machine()}\n\n{notes}\n\n"
        f"SFT and DPO: 8 examples (pairs) a step, up to 256 tokens, AdamW. GRPO: {_tuning.GROUPS} "
        f"prompts, {_tuning.GENERATIONS} completions of up to 64 tokens each, no KL; a step is "
        "rollout, rewards and update. `over Fornax`: the median, over rounds, of the time (and the "
        "ratio of the peak memory of the process) over that of Fornax in the same round.\n\n"
        f"{_harness.table(header, rows)}\n"
    )
    if not args.no_write:
        print(_harness.write_results("post_training", text))


if __name__ == "__main__":
    main()
