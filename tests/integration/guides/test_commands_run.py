"""The commands of the pages that newcomers read run as they are printed, page by page."""

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.pages import ROOT, Block, blocks
from tests.unit.tune.tiny import COLOURS, save_model
from tests.xla_flags import xla_flags

from fornax import export
from fornax.data import BuildConfig, Text, TrainBpe, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="pages ask servers by curl"),
]

LIMIT = 900
"""Seconds for a block: what takes a few on an idle machine, on one that is not."""
PORTS = ("8000", "8080", "8081", "8476")
"""Ports on pages; each is another one here, since tests run in parallel."""
PRELUDE = """
set -eo pipefail
pip() { echo "tests install nothing: mark the block"; return 1; }
curl() { command curl --fail-with-body --silent --show-error "$@"; }
# Commands that name no server ask the one on its default port.
fornax() {
  case "$1 $2 $*" in
    *--url*) command fornax "$@" ;;
    "bench host "*"--protocol grpc"*) command fornax "$@" --url 127.0.0.1:8081 ;;
    "host "[slur][a-z]*" "*|"bench host "*) command fornax "$@" --url http://127.0.0.1:8080 ;;
    *) command fornax "$@" ;;
  esac
}
"""


def _model(folder: Path, at: str) -> None:
    """A small random model with a chat template where a page has one."""
    (folder / at).parent.mkdir(parents=True, exist_ok=True)
    made = save_model(folder / ".made", max_position_embeddings=512)
    shutil.copytree(made, folder / at)


def _corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    with gzip.open(folder / "corpus" / "a.jsonl.gz", "wt") as file:
        for number in range(200):
            said = " ".join(COLOURS[(number + n * n) % len(COLOURS)] for n in range(20))
            file.write(json.dumps({"text": f"{number}: {said}"}) + "\n")


def _quickstart(folder: Path) -> None:
    """The two models of the quickstart."""
    _model(folder, "runs/quickstart/hf")
    (folder / "runs/quickstart/hf-tuned").symlink_to("hf")


def _hosting(folder: Path) -> None:
    _model(folder, "runs/quickstart/hf")
    (folder / "triton" / "ranker").mkdir(parents=True)
    (folder / "triton" / "ranker" / "config.pbtxt").write_text("max_batch_size: 32\n")


def _tutorial(folder: Path) -> None:
    """What a quickstart leaves behind, of a small model and a hundred short files; and notes."""
    _quickstart(folder)
    run, notes = folder / "runs" / "quickstart", folder / "notes"
    notes.mkdir()
    for number in range(100):
        said = " ".join(COLOURS[(number + n * n) % len(COLOURS)] for n in range(40))
        (notes / f"{number}.txt").write_text(f"{number}: {said}")
    source = Text(path=str(notes / "*.txt"))
    tokenizer = TrainBpe(vocab_size=300)
    build(BuildConfig(source=source, output=run / "data", tokenizer=tokenizer, holdout=0.1))
    (run / "config.yaml").write_text(
        "model: {vocab_size: 2048, hidden_size: 16, num_layers: 1, num_heads: 2}\n"
        "data: {source: {type: dataset, path: runs/quickstart/data}}\n"
        "seq_len: 32\neval: {every: 100, batches: 1}\n"
    )
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 7.6}\n')
    export.save(
        run / "models" / "lm" / "1",
        {"score": lambda params, x: {"y": x * params["w"]}},
        {"w": np.ones(2, np.float32)},
        inputs={"score": {"x": export.Spec(("b", 2), "float32")}},
        buckets={"b": [4]},
    )


GIVEN: dict[str, Callable[[Path], None]] = {
    "guides/install.md": lambda folder: None,
    "tutorials/quickstart.md": _tutorial,
    "tutorials/notebooks.md": lambda folder: None,
    "guides/training.md": lambda folder: None,
    "guides/data.md": _corpus,
    "guides/sft.md": _quickstart,
    "guides/reinforcement.md": _quickstart,
    "guides/serving.md": lambda folder: _model(folder, "runs/quickstart/hf"),
    "guides/hosting.md": _hosting,
    "guides/plan.md": lambda folder: None,
    "guides/diffusion.md": lambda folder: None,
}
"""Pages, and what makes the files there that a page says are the reader's."""


def _files(page: Path, folder: Path, ports: dict[str, str]) -> None:
    """Write the files that a page shows: blocks with a title, or with a comment that names them."""
    for block in blocks(page):
        comment = re.match(r"# ([\w.]+\.(?:yaml|py))\b", block.text)
        name = block.options.get("title") or (comment[1] if comment else None)
        if name is not None and block.language in ("yaml", "python", "json"):
            (folder / name).write_text(_with(ports, block.text))


def _with(ports: dict[str, str], text: str) -> str:
    return re.sub(r"(?<=[: ])\d{4}\b", lambda found: ports.get(found[0], found[0]), text)


def _free_ports() -> dict[str, str]:
    with contextlib.ExitStack() as held:
        found = {}
        for port in PORTS:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found[port] = str(probe.getsockname()[1])
        return found


class _Shell:
    """Runs blocks in a folder; a block with `ready` leaves a server behind until the next such."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self.folder, self.ports = folder, ports
        self.server: subprocess.Popen[str] | None = None
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "FORNAX_CACHE_DIR": str(_cache()),
            "XLA_FLAGS": xla_flags(),
        }

    def run(self, block: Block) -> None:
        """Run a block; while a server is up, until it succeeds: what it asks for may take time."""
        ready = block.options.get("ready")
        if ready is not None:
            self.stop()
            before, _, last = _parted(block.text)
            if before.strip():
                self._check(block, before)
            self._serve(block, last, ready)
            return
        ends = time.monotonic() + (LIMIT / 6 if self.server is not None else 0)
        while True:
            try:
                self._check(block, block.text)
                return
            except AssertionError:
                if time.monotonic() > ends:
                    raise

    def _check(self, block: Block, text: str) -> None:
        wanted = int(block.options.get("exit", "0"))
        script = _with(self.ports, PRELUDE + text)
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=LIMIT)
        finally:
            _kill(process)
        assert process.returncode == wanted, f"{block} ended with {process.returncode}:\n{said}"

    def _serve(self, block: Block, text: str, ready: str) -> None:
        log = self.folder / ".server.log"
        with log.open("w") as file:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {_with(self.ports, text).strip()}"],
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        ends = time.monotonic() + LIMIT
        address = _with(self.ports, f" {ready}").strip()
        while True:
            asked = ["curl", "--fail", "--silent", "--max-time", "20", address]
            if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
                return
            alive = self.server.poll() is None and time.monotonic() < ends
            assert alive, f"{block}: {address} is not ready:\n{log.read_text()}"
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server, if there is one."""
        if self.server is not None:
            _kill(self.server)
            self.server = None


def _parted(text: str) -> tuple[str, str, str]:
    """What comes before the last command of a block, and that command."""
    whole = text.rstrip("\n").replace("\\\n", "\\\0")
    return tuple(part.replace("\0", "\n") for part in whole.rpartition("\n"))  # pyrefly: ignore


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cache() -> Path:
    from fornax.config import environment

    return environment.cache_dir()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[_Shell]:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    made = _Shell(tmp_path, _free_ports())
    yield made
    made.stop()


@pytest.mark.parametrize("page", GIVEN)
def test_commands_of_a_page_run(page: str, shell: _Shell) -> None:
    file = ROOT / "docs" / page
    GIVEN[page](shell.folder)
    _files(file, shell.folder, shell.ports)
    for block in blocks(file):
        if block.is_commands and "skip" not in block.options:
            shell.run(block)
