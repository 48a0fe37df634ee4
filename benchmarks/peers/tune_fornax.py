"""Fornax: `fornax tune` as a user runs it, in a directory of its own, stopped between steps.

    tune_fornax.py JOB     JOB: what benchmarks/_tuning.py writes

Nothing is evaluated or saved before the end, and no event files are written.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _harness
import _tuning

_ENDLESS = 1_000_000


def _config(job: _tuning.Job) -> Any:
    from fornax.config import from_mapping
    from fornax.tune.methods import METHODS

    given: dict[str, Any] = {
        "model": job.model,
        "data": job.data,
        "steps": _ENDLESS,
        "batch_size": job.batch,
        "max_length": job.length,
        "remat": "none",
        "save_every": None,
        "doctor": False,
        "log": {"tensorboard": False},
        "optim": {"learning_rate": 1e-6, "schedule": {"type": "constant"}},
    }
    if job.name.startswith("sft"):
        given["packing"] = "none"  # 8 examples a step, as the others have
    if job.name == "sft-lora":
        given["lora"] = {"rank": 16, "alpha": 32}
    if job.name == "grpo":
        given |= {
            "batch_size": _tuning.GROUPS * _tuning.GENERATIONS,
            "group_size": _tuning.GENERATIONS,
            "reward": [f"{_reward_file()}:score"],
            "rollout": {"max_tokens": job.new},
            "algorithm": {"type": "grpo", "kl_coefficient": 0.0},
        }
    return from_mapping(METHODS[job.name.split("-")[0]].config_class(), given)


def _reward_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "rewards.py"
    path.write_text(
        "def score(completions, **columns):\n"
        '    return [text.count("e") / max(len(text), 1) for text in completions]\n'
    )
    return path


class _Stop:
    """A progression that lets the run continue when the gate allows it."""

    def __init__(self, gate: _tuning.Gate) -> None:
        self._gate = gate
        self.last: dict[str, Any] = {}

    def start(self, step: int, total: int, unit: str) -> None:
        self._gate.step()

    def update(self, record: Mapping[str, Any], seconds_left: float | None) -> None:
        self.last = dict(record)
        self._gate.step()

    def log(self, text: str) -> None:
        print(text, file=sys.stderr)

    def close(self) -> None:
        print(self.last, file=sys.stderr)


def _make(job: _tuning.Job) -> tuple[Callable[[], None], dict[str, Any]]:
    import jax

    from fornax.tune import tune

    gate = _tuning.Gate(job.steps, lambda: jax.block_until_ready(jax.live_arrays()))
    out = Path(tempfile.mkdtemp()) / "run"
    train = functools.partial(tune, _config(job), out, progress=_Stop(gate))
    said = {"versions": _harness.versions("jax", "flax", "fornax-ai"), "run": str(out)}
    return gate.run(train), said


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    job = _tuning.read_job(sys.argv[1])
    _harness.serve(lambda: _make(job))
