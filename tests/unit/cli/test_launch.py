"""`fornax launch`: the commands of the README, word for word, to where processes would start."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fornax.cluster
import fornax.cluster.routing
import fornax.train
import fornax.tune
from fornax.cli.main import main

ROOT = Path(__file__).parents[3]
README = re.findall(r"`(fornax (?:launch|plan goodput) [^`]*)`", (ROOT / "README.md").read_text())
PLANNED = [
    "fornax launch --hosts 4 -- train --config recipes/stdlib.yaml --run-dir runs/four",
    "fornax launch --engine ray --hosts 3..8 -- train --config run.yaml",
    "fornax launch --hosts 2 --samplers 2 -- tune grpo --model DIR --data p.jsonl --reward "
    "r.py:score",
    "fornax launch --replicas 3 -- serve DIR --port 8000",
    "fornax launch status runs/four",
    "fornax launch events runs/four --follow",
    "fornax launch drill runs/four --kill 2",
    "fornax launch drill --stop 0 --slow 1 --partition 3 --preempt 2",
    *(
        f"fornax launch manifest {system} --hosts 16 --topology v5p:4x4x4 -- "
        "train --config run.yaml"
        for system in ("kuberay", "jobset", "slurm", "skypilot")
    ),
    "fornax plan goodput --hosts 4096 --mtbf 25000h --step 12s --state 1.2TB",
]
"""Each form of the command, as its design wrote them down."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with the files that the commands name, and a run that has ended."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    Path("run.yaml").write_text("steps: 20\nmesh: {fsdp: -1}\n")
    Path("runs/four").mkdir(parents=True)
    states = [("forming", "4 hosts", {}), ("ended", "exit code 0", {"code": 0})]
    events = [
        {"time": 1e9 + number, "epoch": 1, "state": state, "why": why, **more}
        for number, (state, why, more) in enumerate(states)
    ]
    Path("runs/four/events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    record = [
        {"attempt": 1, "start_step": 0, "time": 1e9},
        {"attempt": 1, "step": 20, "time": 1e9 + 1, "seconds": {"step": 1}, "spans": [["step", 1]]},
    ]
    Path("runs/four/goodput.jsonl").write_text("".join(json.dumps(e) + "\n" for e in record))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What would be started, instead of starting it."""
    made = SimpleNamespace(job=None, run_dir=None, flags={}, trained=None)

    def launch(job: Any, run_dir: Path, **flags: Any) -> int:
        made.job, made.run_dir, made.flags = job, run_dir, flags
        return 0

    def launch_slices(program: str, words: Callable, run_dir: Path, count: int) -> int:
        made.run_dir, made.flags = run_dir, {"slices": count, "words": words(run_dir / "slice-0")}
        return 0

    def launch_replicas(service: Callable, run_dir: Path, **flags: Any) -> int:
        made.run_dir, made.flags = run_dir, flags
        return 0

    def train(config: Any, run_dir: Path, **_: Any) -> Any:
        made.trained = run_dir
        return SimpleNamespace(exit_code=0, goodput=None)

    monkeypatch.setattr(fornax.cluster, "launch", launch)
    monkeypatch.setattr(fornax.cluster, "launch_slices", launch_slices)
    monkeypatch.setattr(fornax.cluster.routing, "launch_replicas", launch_replicas)
    monkeypatch.setattr(fornax.train, "train", train)
    monkeypatch.setattr(fornax.tune, "tune", train, raising=False)
    return made


@pytest.mark.parametrize("line", dict.fromkeys([*PLANNED, *README]))
def test_a_command_is_taken_as_it_is_written(line: str, here: None, started: Any, capsys: Any):
    """Of those that start processes, the words that each process gets are taken by the command."""
    code, said = main(shlex.split(line)[1:]), capsys.readouterr()
    if " drill " in line:  # nothing runs here
        assert code == 2
        assert "has no running worker of rank 2" in said.err or "no run is named" in said.err
        return
    assert code == 0, said.err
    if started.job is not None:
        assert main(list(started.job.words)) == 0
        assert started.trained == started.run_dir
    else:
        assert said.out or started.run_dir


def test_a_command_without_a_run_directory_has_that_of_the_command_alone(here: None, started: Any):
    words = "fornax launch --engine ray --hosts 3..8 -- train --config run.yaml --steps 9"
    assert main(words.split()[1:]) == 0
    assert (started.flags["engine"], started.flags["address"]) == ("ray", None)
    assert (started.job.least, started.job.hosts) == (3, 8)
    assert started.run_dir == Path("runs/run")
    assert started.job.words == (
        *("train", "--run-dir", "runs/run", "--config", "run.yaml", "--steps", "9"),
    )
    main(["launch", "--", "train", "--config=run.yaml", "--run_dir=other"])
    assert started.run_dir == Path("other")
    assert started.job.words == ("train", "--config=run.yaml", "--run_dir=other")
    main(["launch", "--", "train", "--steps", "3"])
    assert started.run_dir == Path("runs/train")
    main(["launch", "--", "tune", "sft", "--model", "m", "--data", "d"])
    assert started.job.words[:4] == ("tune", "sft", "--out", "runs/sft")


def test_slices_share_the_run_directory_that_nobody_named(here: None, started: Any):
    words = ["launch", "--slices", "2", "--hosts", "3", "--", "train", "--config", "run.yaml"]
    assert main(words) == 0
    assert started.run_dir == Path("runs/run")
    assert started.flags["slices"] == 2
    words = ["launch", "--hosts", "3", "--", "train", "--run-dir", "runs/run/slice-0"]
    assert started.flags["words"] == [*words, "--config", "run.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --config nowhere.yaml", "the config file nowhere.yaml cannot be read"),
        ("train --config run.yaml --run-dir", "--run-dir needs a value"),
        ("train --config --run-dir r", "--config needs a value"),
        ("tune doctor sft --model m", "tune doctor cannot be launched"),
        ("evaluate", "evaluate cannot be launched"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    words: str, said: str, here: None, started: Any, capsys: Any
):
    assert main(["launch", "--", *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert started.job is None
    assert started.run_dir is None
