"""The training step at two revisions: `python benchmarks/compare_step.py --base REF`.

The step of a small decoder is compiled and captured once by the code of a base revision, checked
out beside, and once by the code that lies here, each in a process of its own. FLOPs and bytes come
from the compiled programs and are exact: the exit code is 1 where they grow by more than is
allowed. Times are compared by `fornax profile compare` and only shown: a machine that runs a
project's checks is never quiet.

Without `--base` the base is where this branch left the default branch of `origin`, or, on that
branch, the commit before. Where there is no such commit, or its code has no step that can be made
as below, nothing is compared, and that is said.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 40
WARM_UP = 3
BRANCHES = ("origin/HEAD", "origin/main", "origin/master")
FLOPS_OVER, BYTES_OVER = 0.005, 0.02
SECONDS = 900


def work(source: Path, out: Path) -> None:
    """The process of one capture; with jax's own profiler, which a base of any age has."""
    import fornax

    if not Path(fornax.__file__).resolve().is_relative_to(source.resolve()):
        sys.exit(f"{source} holds no fornax")  # the environment's own would take its place

    import jax
    import numpy as np

    from fornax.models import DecoderConfig
    from fornax.train import Ledger, TrainConfig, pretrain_task
    from fornax.train.hosts import to_global
    from fornax.train.session import first_state, prepare
    from fornax.train.tasks.pretrain import row_shapes

    model = DecoderConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    )
    config = TrainConfig(model=model, batch_size=4, seq_len=128, steps=STEPS)
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger())
    rng = np.random.default_rng(0)
    rows = {
        name: rng.integers(0, 2, each.shape).astype(each.dtype)
        for name, each in row_shapes(config, programs.hosts).items()
    }
    shapes = programs.shapes_of(rows)
    step = programs.lower_step(shapes).compile()
    batch, state = to_global(rows, shapes), first_state(config, programs)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    for number in range(-WARM_UP, STEPS):
        if number == 0:
            jax.profiler.start_trace(out, profiler_options=options)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state, _ = step(state, batch, programs.frozen)
            jax.block_until_ready(state)
    jax.profiler.stop_trace()


def git(*words: str) -> str | None:
    """What git says; None where it fails."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def find_base() -> str | None:
    """Where this branch left the default branch, else the commit before."""
    head = git("rev-parse", "HEAD")
    for branch in BRANCHES:
        base = git("merge-base", "HEAD", branch)
        if base and base != head:
            return base
    return git("rev-parse", "--verify", "--quiet", "HEAD^")


def capture(source: Path, out: Path) -> str:
    """Capture the step of the code in `source`; what went wrong, or nothing."""
    environment = {**os.environ, "PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = ""
    command = [sys.executable, __file__, "--source", str(source), "--work", str(out)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took over {SECONDS} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", help="a commit, branch or tag (default: found, see above)")
    parser.add_argument("--flops-over", type=float, default=FLOPS_OVER, help="0.005 for 0.5 %%")
    parser.add_argument("--bytes-over", type=float, default=BYTES_OVER)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--source", type=Path)
    args = parser.parse_args()
    if args.work:
        work(args.source, args.work)
        return 0
    if git("rev-parse", "HEAD") is None:
        print("no git history here: the training step is not compared")
        return 0
    base = args.base or find_base()
    if not base:
        print("no base is known (no default branch of origin, no commit before): not compared")
        return 0
    commit = git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    if commit is None:
        print(f"error: {base} is not a commit; name one with BASE=, or fetch it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "base"
        if git("worktree", "add", "--detach", str(tree), commit) is None:
            print(f"error: {commit} cannot be checked out in {tree}", file=sys.stderr)
            return 2
        try:
            return compared(Path(scratch), tree, commit, args)
        finally:
            git("worktree", "remove", "--force", str(tree))


def compared(scratch: Path, tree: Path, commit: str, args: argparse.Namespace) -> int:
    problem = capture(tree / "src", scratch / "before")
    if problem:
        print(f"the training step of {commit[:12]} cannot be made by this script: {problem}")
        return 0
    problem = capture(ROOT / "src", scratch / "after")
    if problem:
        print(f"error: the training step fails here: {problem}", file=sys.stderr)
        return 1
    from fornax import profile
    from fornax.cli.profile_comparison import print_comparison
    from fornax.profile.compare import compare

    found = compare(profile.read(scratch / "before"), profile.read(scratch / "after"))
    print(f"the training step: {commit[:12]} and what lies here\n")
    print_comparison(found, 8)
    print()
    failed = False
    for what, allowed in (("flops", args.flops_over), ("bytes", args.bytes_over)):
        before, after = getattr(found.before, what), getattr(found.after, what)
        grew = after / before - 1
        over = grew > allowed
        failed |= over
        print(
            f"{what} of a step {before:,.0f} -> {after:,.0f} ({grew:+.3%}; allowed {allowed:+.2%})"
            + (": TOO MANY" if over else "")
        )
    print(f"time of a step {found.step.value - 1:+.1%}: advisory")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
