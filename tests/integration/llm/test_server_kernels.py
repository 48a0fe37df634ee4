"""The server's log says at start which implementation each kernel got, and why no faster one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from fornax.models import DecoderConfig, create_decoder, save_pretrained

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    max_position_embeddings=64,
)


@pytest.mark.exhaustive
def test_without_a_compiler_the_log_says_why_the_native_kernel_is_not_used(tmp_path: Path) -> None:
    save_pretrained(create_decoder(CONFIG, seed=0), tmp_path / "model")
    words = {f"word{index}": index for index in range(CONFIG.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    log = tmp_path / "log"
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    command = [
        *(Path(sys.executable).with_name("fornax"), "serve", tmp_path / "model"),
        *("--port", "0", "--max-num-seqs", "2", "--max-num-batched-tokens", "4"),
    ]
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**kept, "CXX": "/no/such/compiler", "FORNAX_CACHE_DIR": str(tmp_path / "cache")},
        )
    wanted = "kernel paged_attention: xla (native: no C++ compiler was found"
    try:
        deadline = time.monotonic() + 120
        while wanted not in log.read_text() and time.monotonic() < deadline:
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(120)
    said = [line for line in log.read_text().splitlines() if wanted in line]
    assert len(said) == 1, log.read_text()
