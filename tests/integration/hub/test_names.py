"""Models and datasets by their names on the Hub, through the commands that people type."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

TOKENS = '[{{"type": "tokenize", "tokenizer": "{}"}}]'
GENERATE = ("--prompt", "a b", "--max-tokens", "3")


@pytest.mark.exhaustive
def test_a_model_is_generated_from_by_name_and_fetched_once(hub: Any, fornax: Any):
    code, first = fornax("generate", "org/tiny", *GENERATE)
    assert code == 0, first
    fetched = hub.fetched()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(fetched)
    assert not [f for f in fetched if f.endswith((".bin", ".py", ".md")) or "original" in f]
    before = len(hub.requests)
    for offline in ("0", "1"):
        code, again = fornax("generate", "org/tiny", *GENERATE, HF_HUB_OFFLINE=offline)
        assert code == 0, again
        assert again.splitlines()[-2] == first.splitlines()[-2]
    assert not hub.fetched(before)


@pytest.mark.exhaustive
def test_a_download_cut_short_goes_on_where_it_stopped(hub: Any, fornax: Any, tiny: Path):
    hub.cut.add("model.safetensors")
    fornax("generate", "org/tiny", *GENERATE)
    code, output = fornax("generate", "org/tiny", *GENERATE)
    assert code == 0, output
    assert hub.fetched().count("model.safetensors") == 2


@pytest.mark.exhaustive
def test_a_revision_is_the_one_that_was_asked_for(hub: Any, fornax: Any, tmp_path: Path):
    [(first, files)] = hub.repositories["models", "org/tiny"].items()
    hub.push("models", "org/tiny", {**files, "config.json": b"broken"})
    code, output = fornax("generate", f"org/tiny@{first}", *GENERATE)
    assert code == 0, output
    code, output = fornax("generate", "org/tiny@none", *GENERATE)
    assert code == 2
    assert "org/tiny has no revision none; check what follows the @" in output


@pytest.mark.slow
def test_only_the_config_is_fetched_for_a_plan(hub: Any, fornax: Any):
    code, output = fornax(
        *("plan", "serve", "--model", "org/tiny", "--topology", "v6e:1x1", "--predicted")
    )
    assert code == 0, output
    assert "org/tiny" in output
    assert all(name.endswith(".json") for name in hub.fetched())


@pytest.mark.exhaustive
def test_a_run_is_tuned_from_names_and_goes_on_at_the_commit_it_began_at(
    hub: Any, fornax: Any, tmp_path: Path
):
    """Adapters hold nothing of their base, which is fetched again on another machine."""
    words = ("tune", "sft", "--model", "org/tiny", "--data", "org/chats", "--out", "run")
    small = ("--batch-size", "8", "--lora.rank", "2", "--max-length", "64", "--doctor", "false")
    code, output = fornax(*words, *small, "--steps", "2")
    assert code == 0, output
    assert "data/train.jsonl" in hub.fetched()
    assert "data/test.jsonl" not in hub.fetched()
    [commit] = hub.repositories["models", "org/tiny"]
    assert f"model: org/tiny@{commit}" in (tmp_path / "run" / "config.yaml").read_text()
    hub.push("models", "org/tiny", {"config.json": b"{}"})
    shutil.rmtree(tmp_path / "hub")
    code, output = fornax("generate", "run", *GENERATE)
    assert code == 0, output
    code, output = fornax("convert", "run", "--merge-lora", "--out", "merged")
    assert code == 0, output


@pytest.mark.exhaustive
def test_every_command_that_takes_a_model_takes_a_name(
    hub: Any, fornax: Any, begin: Any, tmp_path: Path, tiny: Path
):
    (tmp_path / "text.txt").write_text("a b c a b c " * 20)
    for words in (
        ("export", "--model", "org/tiny", "--out", "bundle/1", "--batch", "1", "--length", "8"),
        ("convert", "org/tiny", "--out", "made"),
        ("eval", "--model", "org/tiny", "--text", "text.txt"),
        (
            *("train", "--init-from", "org/tiny", "--model", "null", "--run-dir", "on"),
            *("--steps", "1", "--batch-size", "8", "--seq-len", "16", "--data.holdout", "0"),
            *(
                "--data.source.type",
                "jsonl",
                "--data.source.path",
                "hf://datasets/org/texts/*.jsonl",
            ),
            *("--data.transforms", TOKENS.format(tiny / "model")),
        ),
    ):
        code, output = fornax(*words)
        assert code == 0, output
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = begin("serve", "org/tiny", "--port", str(port), "--max-num-seqs", "2")
    try:
        assert served(server, port)["data"][0]["id"] == "org/tiny"
    finally:
        server.terminate()
        server.communicate(timeout=400)


def served(server: subprocess.Popen, port: int) -> dict[str, Any]:
    """What the server says of its models, once it answers."""
    deadline = time.monotonic() + 240
    while True:
        assert server.poll() is None, server.communicate()[0]
        assert time.monotonic() < deadline
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.2)


@pytest.mark.exhaustive
def test_what_is_neither_a_path_nor_a_name_is_one_paragraph(hub: Any, fornax: Any, tmp_path: Path):
    def refused(*words: str, **variables: str) -> str:
        code, output = fornax(*words, **variables)
        assert code == 2, output
        assert "Traceback" not in output
        return " ".join(output.split())

    assert f"org/none is neither a path here nor a model at {hub.address}" in refused(
        "generate", "org/none", *GENERATE
    )
    assert "HF_HUB_OFFLINE" in refused("generate", "org/tiny", *GENERATE, HF_HUB_OFFLINE="1")
    assert "cannot be fetched from http://127.0.0.1:9" in refused(
        "generate", "org/tiny", *GENERATE, HF_ENDPOINT="http://127.0.0.1:9"
    )
    hub.push("models", "org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    assert "org/pickled has no weights as .safetensors, and pickled ones" in refused(
        "generate", "org/pickled", *GENERATE
    )
    hub.push("datasets", "org/scripts", {"load.py": b"x"})
    assert "the dataset org/scripts has no *.jsonl" in refused(
        *("tune", "sft", "--model", "org/tiny", "--data", "org/scripts", "--out", "run")
    )


@pytest.mark.exhaustive
def test_a_token_opens_what_is_gated_and_a_path_wins(hub: Any, fornax: Any, tmp_path: Path):
    hub.private.add("org/tiny")
    code, output = fornax("generate", "org/tiny", *GENERATE)
    assert code == 2
    assert "org/tiny is gated: accept its terms" in " ".join(output.split())
    code, output = fornax("generate", "org/tiny", *GENERATE, HF_TOKEN="let-me-in")
    assert code == 0, output
    before = len(hub.requests)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    code, output = fornax("generate", "org/tiny", *GENERATE)
    assert code == 2
    assert "org/tiny is neither a run directory with checkpoints nor" in " ".join(output.split())
    assert len(hub.requests) == before
