"""One rank compiles and the others load, in real groups: after a fault, and on fewer hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.cluster.conftest import CHANGES, EXACT
from tests.integration.cluster.test_client import run_python
from tests.integration.train.conftest import COMMAND
from tests.ports import held_port

from fornax.cluster import drill
from fornax.config.jsonl import read_json_lines

pytestmark = [pytest.mark.slow]

NO_CACHE = {"FORNAX_COMPILATION_CACHE": "0"}
"""Without jax's own cache on disk: nothing else than the service saves a compilation."""


def made(events: list[dict[str, Any]], program: str) -> list[tuple[int, str, list[int]]]:
    return [
        (e["epoch"], e["how"], e["ranks"])
        for e in events
        if e.get("program") == program and "ranks" in e
    ]


@pytest.mark.exhaustive
@pytest.mark.fault
def test_one_rank_compiles_and_after_a_fault_none_with_the_losses_of_processes_that_all_do(
    launch: Any, environment: dict[str, str], settings: dict[str, Any], tmp_path: Path
):
    run = launch(env=NO_CACHE)
    run.wait_for_step(1, 12)
    drill(run.run_dir, "kill", 0)
    code, output = run.finish()
    assert code == 0, output
    assert made(run.events(), "initial state") == [(1, "compiled", [0])]
    assert made(run.events(), "step") == [(1, "compiled", [0]), (2, "loaded", [])]
    assert run.exact() == by_themselves(environment, settings, tmp_path)
    assert not run.descendants()


def by_themselves(
    environment: dict[str, str], settings: dict[str, Any], folder: Path
) -> list[tuple]:
    """The numbers of two processes that no launcher started: each compiles for itself."""
    file, run_dir = folder / "alone.yaml", folder / "alone"
    file.write_text(yaml.safe_dump({**settings, **CHANGES}))
    address = f"127.0.0.1:{held_port()}"
    variables = {**environment, "JAX_PLATFORMS": "cpu", "FORNAX_COORDINATOR": address}
    words = ["train", "--config", str(file), "--run-dir", str(run_dir)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            env={**variables, "FORNAX_NUM_PROCESSES": "2", "FORNAX_PROCESS_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "loaded in" not in said[0]
    records = read_json_lines(run_dir / "metrics.jsonl")
    return [tuple(record.get(name) for name in EXACT) for record in records]


SMALLER = """
import sys, time
from pathlib import Path
from fornax.cluster import Cluster, read_events

config, run_dir = sys.argv[1], Path(sys.argv[2])
with Cluster(hosts=3) as cluster:
    run = cluster.train(config, run_dir=run_dir)
    run.loss()
    deadline = time.monotonic() + 150
    while not [e for e in read_events(run_dir) if "ahead" in e.get("how", "")]:
        assert time.monotonic() < deadline, read_events(run_dir)
        time.sleep(0.1)
    run.resize(2)
    begun = len(run.metrics())
    while len(run.metrics()) < begun + 3:
        time.sleep(0.02)
"""


@pytest.mark.exhaustive
def test_a_group_with_a_host_less_loads_what_was_made_ahead(
    environment: dict[str, str], settings: dict[str, Any], tmp_path: Path
):
    """No process of two was ever there; rank 1 is given what rank 0's host holds."""
    config, run_dir = tmp_path / "run.yaml", tmp_path / "run"
    changes = {**CHANGES, "steps": 100_000, "save_every": None}
    config.write_text(yaml.safe_dump({**settings, **changes}))
    env = {**environment, **NO_CACHE, "JAX_PLATFORMS": "cpu"}
    run_python(SMALLER, [str(config), str(run_dir)], env)
    events = [json.loads(x) for x in (run_dir / "events.jsonl").read_text().splitlines()]
    ahead = [e["program"] for e in events if "ahead" in e.get("how", "")]
    assert ahead[0] == "step"
    assert made(events, "step") == [(1, "compiled", [0]), (2, "loaded", [])]
    assert not [p for p in Path("/proc").glob("[0-9]*") if held(p, run_dir)]


def held(process: Path, run_dir: Path) -> bool:
    """Whether a process of the run is still there."""
    try:
        return str(run_dir).encode() in (process / "cmdline").read_bytes() and process.name != str(
            os.getpid()
        )
    except OSError:
        return False
