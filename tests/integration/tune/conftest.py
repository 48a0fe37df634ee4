"""A tiny model, conversations, and `fornax` as a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.caches import fresh_cache
from tests.unit.tune.tiny import save_chats, save_model
from tests.xla_flags import xla_flags

COMMAND = "import sys; from fornax.cli.main import main; sys.exit(main(sys.argv[1:]))"

Start = Callable[..., subprocess.Popen]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` (two layers) and `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    save_chats(folder / "chats.jsonl", 40)
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One device, and one compilation cache for all processes of the session."""
    kept = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"XLA_FLAGS": xla_flags()}
    return {**kept, "FORNAX_CACHE_DIR": fresh_cache(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def start(environment: dict[str, str]) -> Start:
    """Start `fornax` with these words."""

    def begin(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, words)],
            env={**environment, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return begin


@pytest.fixture
def finish(start: Start) -> Callable[..., str]:
    """Run `fornax` with these words to its end, which must be good; what it said."""

    def run(*words: str | Path) -> str:
        process = start(*words)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output

    return run


@pytest.fixture
def kill_after() -> Callable[[subprocess.Popen, Path, int], bool]:
    """Kill a run once that many steps are recorded; False when it ended before."""

    def kill(process: subprocess.Popen, run_dir: Path, steps: int) -> bool:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                break
            time.sleep(0.001)
        ended = process.poll() is not None
        process.kill()
        process.communicate()
        return not ended

    return kill
