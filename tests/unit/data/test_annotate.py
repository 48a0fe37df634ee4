"""Stages of the input pipeline in a capture, and none of jax in a process without it."""

import json
import subprocess
import sys
from pathlib import Path

import jax

from fornax import profile
from fornax.data import DataConfig, Jsonl, Prefetch, Tokenize, open_batches, train_bpe


def test_stages_are_seen_in_the_thread_that_runs_them(tmp_path: Path) -> None:
    words = ["some words of a text that is long enough"] * 40
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
    train_bpe(words, 300).save(tmp_path / "tokenizer")
    config = DataConfig(
        source=Jsonl(path=str(tmp_path / "text.jsonl")),
        transforms=(Tokenize(tokenizer=str(tmp_path / "tokenizer")),),
        prefetch=Prefetch(buffer=2),
        holdout=0.0,
    )
    opened = open_batches(config, batch_size=8, seq_len=8)
    with profile.capture(tmp_path) as running, opened as batches:
        for _ in range(4):
            next(batches)
    (file,) = running.stop().glob("*.xplane.pb")
    seen = {
        (line.name, event.name)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("input/")
    }
    stages = {"input/read", "input/tokenize", "input/pack", "input/fill"}
    assert {name for _, name in seen} == stages
    assert len({thread for thread, _ in seen}) == 1


def test_a_process_without_jax_has_stages_and_no_profiler() -> None:
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from fornax.data.annotate import stage\n"
        "with stage('read'): pass"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
