"""Rounding takes three times the largest tensor's memory, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fornax.models import DecoderConfig, create_decoder, save_pretrained

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc"),
]

_RUN = """
import json, sys
from fornax.quant import quantize
from tests.peak import peak_of

quantize(sys.argv[1], sys.argv[2], scheme="w4a16")  # threads started
_, peak = peak_of(lambda: quantize(sys.argv[3], sys.argv[4], scheme="w4a16"))
print(json.dumps(peak))
"""


def test_memory_is_that_of_three_tensors(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "num_heads": 8, "vocab_size": 256}
    small = DecoderConfig(**sizes, intermediate_size=256, num_layers=1)
    large = DecoderConfig(**sizes, intermediate_size=24_576, num_layers=1)
    for name, config in (("small", small), ("large", large)):
        save_pretrained(create_decoder(config), tmp_path / name)
    paths = [tmp_path / name for name in ("small", "small-w4", "large", "large-w4")]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, paths)], capture_output=True, text=True, check=True
    )
    largest = 4 * 1024 * 24_576
    assert json.loads(done.stdout) < 3 * largest
