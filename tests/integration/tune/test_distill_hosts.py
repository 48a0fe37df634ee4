"""Top-k distillation by two processes: the logits stored, and the losses, are one process's."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.integration.train.test_hosts import finish_all, free_port, series
from tests.unit.tune.tiny import save_model

Start = Callable[..., subprocess.Popen]


@pytest.mark.slow
def test_two_processes_store_and_learn_what_one_does(
    start: Start, finish: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    teacher = save_model(tmp_path / "teacher", seed=7)
    words: list[str | Path] = ["tune", "distill", "--teacher", teacher, "--model", tiny / "model"]
    words += ["--data", tiny / "chats.jsonl", "--logits.type", "top_k", "--logits.k", "8"]
    words += ["--batch-size", "8", "--max-length", "128", "--steps", "6", "--no-doctor"]
    words += ["--mesh.data", "-1", "--mesh.fsdp", "1", "--log.no-tensorboard"]
    one, two = tmp_path / "one", tmp_path / "two"
    finish(*words, "--out", one)
    address = f"localhost:{free_port()}"
    hosts = [
        start(
            *words,
            "--out",
            two,
            env={
                "FORNAX_COORDINATOR": address,
                "FORNAX_NUM_PROCESSES": "2",
                "FORNAX_PROCESS_ID": str(number),
            },
        )
        for number in range(2)
    ]
    finish_all(hosts)
    stored = [
        [np.load(out / "teacher_logits" / "train" / f"{name}.npy") for name in ("ids", "logprobs")]
        for out in (one, two)
    ]
    np.testing.assert_array_equal(stored[0][0], stored[1][0])
    np.testing.assert_allclose(stored[0][1], stored[1][1], rtol=1e-5)
    assert (stored[1][1].min(axis=1) < 0).all()  # every trained position has its tokens
    assert series(two, "trained_tokens") == series(one, "trained_tokens")
    assert series(two, "loss") == pytest.approx(series(one, "loss"), rel=1e-4)
