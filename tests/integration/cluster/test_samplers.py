"""Reinforcement learning across processes: trainers and samplers apart, some of them killed."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster.conftest import SECONDS, Launched
from tests.integration.train.conftest import COMMAND
from tests.unit.tune.tiny import save_chats, save_grpo, save_model

from fornax.cluster.drill import drill, drill_beside
from fornax.config import worker_record
from fornax.config.jsonl import read_json_lines

pytestmark = pytest.mark.slow

STEPS = 8
EXACT = ("step", "loss", "grad_norm", "reward", "entropy", "mismatch_kl", "staleness")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts and a reward."""
    return save_grpo(tmp_path_factory.mktemp("grpo"))


def words(folder: Path, out: Path) -> list[str]:
    """The command of one process. With its learning rate what two hosts add up in another order
    changes no token."""
    given = ["tune", "grpo", "--model", str(folder / "model"), "--out", str(out)]
    given += ["--data", str(folder / "prompts.jsonl"), "--reward-workers", "1"]
    given += ["--reward", f"{folder / 'my_rewards.py'}:score", "--steps", str(STEPS)]
    given += ["--batch-size", "16", "--group-size", "4", "--rollout.max-tokens", "60"]
    given += ["--rollout.shards", "4", "--max-length", "96", "--optim.learning-rate", "1e-6"]
    return [*given, "--lora", "null", "--log.no-tensorboard", "--no-doctor", "--progress", "lines"]


def begin(
    environment: dict[str, str],
    folder: Path,
    out: Path,
    hosts: Sequence[str],
    command: Sequence[str] = (),
) -> Launched:
    """Start it, or another command, launched on hosts unless there are none."""
    command = command or words(folder, out)
    given = ["launch", *hosts, "--", *command] if hosts else command
    variables = {**environment, "JAX_PLATFORMS": "cpu", "FORNAX_TEST_RUN": str(out)}
    with out.with_suffix(".output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *given],
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Launched(process, out)


def exact(out: Path) -> list[tuple]:
    return [tuple(r.get(k) for k in EXACT) for r in read_json_lines(out / "metrics.jsonl")]


def samples(out: Path) -> list[dict[str, Any]]:
    return read_json_lines(out / "samples.jsonl")


@pytest.fixture(scope="module")
def undisturbed(
    environment: dict[str, str], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two trainers, two samplers."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    code, said = begin(
        environment, folder, out, ["--hosts", "2", "--samplers", "2", "--no-spares"]
    ).finish()
    assert code == 0, said
    assert len(exact(out)) == STEPS
    return out


@pytest.mark.exhaustive
def test_trainers_and_samplers_apart_learn_what_one_process_does(
    environment: dict[str, str], folder: Path, undisturbed: Path, tmp_path: Path
) -> None:
    code, said = begin(environment, folder, tmp_path / "one", []).finish()
    assert code == 0, said
    one, two = samples(tmp_path / "one"), samples(undisturbed)
    assert len(one) == 16 * STEPS
    for name in ("prompt", "completion", "rewards", "versions", "round", "group"):
        assert [line[name] for line in two] == [line[name] for line in one], name
    records = [read_json_lines(out / "metrics.jsonl") for out in (tmp_path / "one", undisturbed)]
    for mine, theirs in zip(*records, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-3, abs=1e-5)
        assert theirs["reward"] == mine["reward"]
        assert theirs["staleness"] == 0


@pytest.mark.exhaustive
@pytest.mark.fault
def test_a_sampler_and_a_trainer_that_are_killed_change_no_bit(
    environment: dict[str, str], folder: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = begin(environment, folder, tmp_path / "run", ["--hosts", "2", "--samplers", "2"])
    wait_for_sampler(run, 1, 1)
    killed = drill_beside(run.run_dir, "kill", "sampler", 1)
    run.wait_for_step(0, 4)
    drill(run.run_dir, "kill", 0)
    code, said = run.finish()
    assert code == 0, said
    assert exact(run.run_dir) == exact(undisturbed)
    assert samples(run.run_dir) == samples(undisturbed)
    told = [event["why"] for event in run.events() if "sampler" in event and "why" in event]
    assert told == ["sampler 1 ended with SIGKILL; another takes its place"]
    assert run.faults() == [("killed", 0)]
    assert killed not in run.descendants()
    assert not run.descendants()
    assert not list((run.run_dir / "cluster").glob("*.record"))


def wait_for_sampler(run: Launched, number: int, version: int) -> None:
    """Until it draws with a version."""
    deadline = time.monotonic() + SECONDS
    record = run.run_dir / "cluster" / f"sampler-{number}.record"
    while True:
        state = worker_record.read(record)
        if state is not None and state.phase == "generate" and state.step >= version:
            return
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, run.events()


@pytest.mark.exhaustive
def test_students_of_two_hosts_and_samplers_learn_what_one_process_does(
    environment: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    save_model(tmp_path / "teacher", seed=7)
    save_chats(tmp_path / "chats.jsonl")

    def command(out: Path) -> list[str]:
        given = ["tune", "distill", "--model", str(folder / "model"), "--out", str(out)]
        given += ["--teacher", str(tmp_path / "teacher" / "model"), "--lora", "null"]
        given += ["--data", str(tmp_path / "chats.jsonl"), "--batch-size", "6", "--steps", "3"]
        given += ["--on-policy.share", "1", "--on-policy.max-tokens", "24"]
        given += ["--on-policy.shards", "3", "--max-length", "96", "--log.every", "1"]
        given += ["--optim.learning-rate", "1e-6", "--log.no-tensorboard", "--no-doctor"]
        return [*given, "--progress", "lines"]

    runs = [
        begin(environment, folder, out, hosts, command(out))
        for out, hosts in (
            (tmp_path / "one", []),
            (tmp_path / "two", ["--hosts", "2", "--samplers", "2", "--no-spares"]),
        )
    ]
    for run in runs:
        code, said = run.finish()
        assert code == 0, said
    one, two = (read_json_lines(run.run_dir / "metrics.jsonl") for run in runs)
    assert [record["on_policy"] for record in one] == [1, 1, 1]
    for mine, theirs in zip(one, two, strict=True):
        for name in ("loss", "divergence", "grad_norm", "agreement"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
    assert [r["trained_tokens"] for r in one] == [r["trained_tokens"] for r in two]


def test_what_draws_nothing_has_no_samplers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "launch", "--samplers", "2", "--"]
    for given in (["train", "--run-dir", "x"], ["tune", "sft", "--model", "m", "--data", "d"]):
        ended = subprocess.run(
            [*command, *given], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert ended.returncode == 2
        assert f"{' '.join(given[:2])} has no use for --samplers" in ended.stderr
