"""Runs with real captures of a small jitted step, one of which does more work than the other."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from fornax import profile

__all__ = ["captured_runs"]

STEPS = 10


def captured_runs(folder: Path) -> Path:
    """`folder/runs` with the runs `before` and `after`, each with a capture of ten steps; `after`
    has one that is cut off too."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ x) / 100

    def longer(x: jax.Array) -> jax.Array:
        with jax.named_scope("added"):
            return step(jnp.sin(x @ x) / 100)

    for name, program in (("before", step), ("after", longer)):
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        _capture(run / "profile", jax.jit(program))
    whole = next((folder / "runs/after/profile").rglob("*.xplane.pb"))
    broken = folder / "runs/after/profile/cut-off"
    broken.mkdir()
    (broken / whole.name).write_bytes(whole.read_bytes()[:-1000])
    return folder / "runs"


def _capture(out: Path, program: Callable[[jax.Array], jax.Array]) -> None:
    x = jnp.ones((128, 128))
    program(x).block_until_ready()
    with profile.capture(out):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                program(x).block_until_ready()
