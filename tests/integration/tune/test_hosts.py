"""Tuning by three processes, which do not divide the batch: what one process learns."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.integration.train.test_hosts import finish_all, series
from tests.ports import held_port
from tests.unit.tune.tiny import save_model

Start = Callable[..., subprocess.Popen]


def start_three(start: Start, *words: str | Path) -> list[subprocess.Popen]:
    """The same command in three processes."""
    told = {"FORNAX_COORDINATOR": f"localhost:{held_port()}", "FORNAX_NUM_PROCESSES": "3"}
    return [start(*words, env={**told, "FORNAX_PROCESS_ID": str(n)}) for n in range(3)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_three_processes_store_and_learn_what_one_does(
    start: Start, finish: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    teacher = save_model(tmp_path / "teacher", seed=7)
    words: list[str | Path] = ["tune", "distill", "--teacher", teacher, "--model", tiny / "model"]
    words += ["--data", tiny / "chats.jsonl", "--logits.type", "top_k", "--logits.k", "8"]
    words += ["--batch-size", "8", "--max-length", "128", "--steps", "6", "--no-doctor"]
    words += ["--mesh.data", "-1", "--mesh.fsdp", "1", "--log.no-tensorboard"]
    one, three = tmp_path / "one", tmp_path / "three"
    finish(*words, "--out", one)
    finish_all(start_three(start, *words, "--out", three))
    stored = [
        [np.load(out / "teacher_logits" / "train" / f"{name}.npy") for name in ("ids", "logprobs")]
        for out in (one, three)
    ]
    np.testing.assert_array_equal(stored[0][0], stored[1][0])
    np.testing.assert_allclose(stored[0][1], stored[1][1], rtol=1e-5)
    assert (stored[1][1].min(axis=1) < 0).all()  # every trained position has its tokens
    assert series(three, "trained_tokens") == series(one, "trained_tokens")
    assert series(three, "loss") == pytest.approx(series(one, "loss"), rel=1e-4)


@pytest.mark.exhaustive
def test_three_processes_prefer_what_one_does(
    start: Start, finish: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    """The reference's log-probs too are of every pair once, and padding is in no metric."""
    pairs = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": f"say {n}", "chosen": "yes " * (1 + n % 5), "rejected": "no " * (1 + n % 3)}
        for n in range(22)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words: list[str | Path] = ["tune", "dpo", "--model", tiny / "model", "--data", pairs]
    words += ["--batch-size", "4", "--max-length", "128", "--steps", "6", "--no-doctor"]
    words += ["--eval-share", "0.25", "--eval.every", "3", "--reference", "stored"]
    words += ["--mesh.data", "-1", "--mesh.fsdp", "1", "--log.no-tensorboard"]
    one, three = tmp_path / "one", tmp_path / "three"
    finish(*words, "--out", one)
    finish_all(start_three(start, *words, "--out", three))
    assert series(three, "pairs") == series(one, "pairs")
    for name in ("loss", "reward_margin", "logps_chosen", "length_rejected", "drift"):
        assert series(three, name) == pytest.approx(series(one, name), rel=1e-4, abs=1e-6), name
    # Before the first update every margin is zero, and its sign rounding.
    right, expected = (
        {k: v for k, v in series(run, "accuracy").items() if k > 1} for run in (three, one)
    )
    assert right == expected
    for name in ("eval/loss", "eval/weight"):
        whole, found = (series(run, name) for run in (one, three))
        assert any(whole.values())
        assert {k: v or 0 for k, v in found.items()} == pytest.approx(
            {k: v or 0 for k, v in whole.items()}, rel=1e-4
        )
