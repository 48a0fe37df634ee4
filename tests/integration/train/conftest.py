"""A small dataset, a small model, and `fornax train` as a process of its own."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.caches import fresh_cache
from tests.xla_flags import xla_flags

from fornax.data import BuildConfig, Jsonl, TrainBpe, build

COMMAND = "import sys; from fornax.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 thousand tokens of made-up words, a tenth held out."""
    folder = tmp_path_factory.mktemp("dataset")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(200)]
    lines = [{"text": " ".join(rng.choices(words, k=rng.randint(5, 90)))} for _ in range(300)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = BuildConfig(
        source=Jsonl(path=str(folder / "text.jsonl")),
        output=folder / "built",
        tokenizer=TrainBpe(vocab_size=320),
        holdout=0.1,
    )
    return build(config).path


@pytest.fixture(scope="session")
def settings(dataset: Path) -> dict[str, Any]:
    """The config of a small run, as a mapping."""
    return {
        "steps": 20,
        "batch_size": 8,
        "seq_len": 32,
        "save_every": 5,
        "model": {
            "vocab_size": 320,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "data": {"source": {"type": "dataset", "path": str(dataset)}},
        "eval": {"every": 10, "batches": 2},
        "log": {"tensorboard": False},
    }


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One device, one compilation cache for all processes of the session, quick compilations."""
    kept = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"XLA_FLAGS": xla_flags()}
    kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return {**kept, "FORNAX_CACHE_DIR": fresh_cache(tmp_path_factory.mktemp("cache"))}


Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(environment: dict[str, str], settings: dict[str, Any], tmp_path: Path) -> Start:
    """Start `fornax train` on a run directory; keyword arguments change the settings."""

    def begin(
        run_dir: Path,
        flags: Sequence[str] = (),
        *,
        env: dict[str, str] | None = None,
        **changes: Any,
    ) -> subprocess.Popen:
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({**settings, **changes}))
        words = ["train", "--config", str(file), "--run-dir", str(run_dir), *flags]
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            env={**environment, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return begin


Finish = Callable[..., tuple[int, str]]


@pytest.fixture
def finish(start: Start) -> Finish:
    """Run `fornax train` to its end; returns the exit code and what it printed."""

    def run(run_dir: Path, flags: Sequence[str] = (), **changes: Any) -> tuple[int, str]:
        process = start(run_dir, flags, **changes)
        output, _ = process.communicate(timeout=400)
        return process.returncode, output

    return run


@pytest.fixture(scope="session")
def uninterrupted(
    environment: dict[str, str], settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The records of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    words = ["train", "--config", str(folder / "config.yaml"), "--run-dir", str(folder / "run")]
    subprocess.run([sys.executable, "-c", COMMAND, *words], env=environment, check=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
