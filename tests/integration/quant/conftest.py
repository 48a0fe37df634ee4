"""A float model, its tokenizer and its text, for the processes that are killed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained

TEXTS = [path.read_text() for path in sorted(Path(np.__file__).parent.glob("linalg/*.py"))]

# A command that waits before the line of its journal that comes after this many: the test, however
# late, kills it before its end.
_HELD = """
import sys, time
from fornax.cli.main import main
from fornax.quant.work import Folder
note, lines = Folder.note, int(sys.argv[1])
def held(self, record):
    if len(self.records) >= lines:
        time.sleep(600)
    note(self, record)
Folder.note = held
sys.exit(main(sys.argv[2:]))
"""


def kill_after(lines: int, words: list[str], journal: Path) -> None:
    """Run a command of `fornax`, and kill it somewhere between that line of its journal and the
    next."""
    process = subprocess.Popen([sys.executable, "-c", _HELD, str(lines), *words])
    try:
        while process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
                break
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Makes a directory for a width of the MLP and a number of layers; `texts.jsonl` is beside
    it."""

    def write(intermediate_size: int, num_layers: int) -> Path:
        folder = tmp_path_factory.mktemp("model")
        train_bpe(TEXTS[:2], 384).save(folder / "tokenizer")
        config = DecoderConfig(
            vocab_size=384,
            hidden_size=128,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            num_heads=4,
            max_position_embeddings=64,
        )
        save_pretrained(create_decoder(config), folder / "float", folder / "tokenizer")
        lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
        (folder / "texts.jsonl").write_text("".join(lines))
        return folder / "float"

    return write
