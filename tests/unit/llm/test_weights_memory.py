"""Serving a quantized directory needs its codes' memory and one layer's beside it, measured in a
process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc"
)

_WRITE = """
import sys, pathlib
import jax.numpy as jnp
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from tests.unit.models.quantized_models import quantize_folder
folder = pathlib.Path(sys.argv[1])
sizes = dict(hidden_size=512, intermediate_size=2048, num_heads=8, vocab_size=1024, num_layers=12)
model = create_decoder(DecoderConfig(**sizes), dtype="bfloat16")
save_pretrained(model, folder / "floats")
quantize_folder(folder / "floats", folder / "codes", "pack")
"""

_WRITE_EXPERTS = """
import sys, pathlib
from fornax.models import config_from_hf, create_decoder, save_pretrained
from tests.unit.models.quantized_models import quantize_folder
folder = pathlib.Path(sys.argv[1])
sizes = dict(hidden_size=512, intermediate_size=512, num_hidden_layers=6, vocab_size=1024,
    max_position_embeddings=128, hidden_act="silu")
heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
experts = dict(num_local_experts=16, num_experts_per_tok=2)
values = {"architectures": ["GptOssForCausalLM"], **sizes, **heads, **experts}
save_pretrained(create_decoder(config_from_hf(values), dtype="bfloat16"), folder / "floats")
picked = ("gate_up_proj", "down_proj")
quantize_folder(folder / "floats", folder / "codes", "gpt-oss", lambda name: name.endswith(picked))
"""

_LOAD = """
import gc, json, sys
import jax
from tests.peak import peak_of
from fornax.llm.config import EngineConfig
from fornax.llm.weights import load_weights

def load():
    config = EngineConfig(dtype="bfloat16", quantization=(*sys.argv[2:], None)[0])
    weights = load_weights(sys.argv[1], config)
    jax.block_until_ready(weights.state)
    return weights

load()  # programs compiled, threads started
gc.collect()
weights, peak = peak_of(load)
print(json.dumps({"peak": peak, "weights": weights.nbytes}))
"""


def _measured(write: str, folder: Path, *options: str) -> dict[str, int]:
    """Bytes of the weights that are loaded, and the height of the process meanwhile."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed is given back
    parent = folder.parent
    if not folder.exists():
        subprocess.run([sys.executable, "-c", write, parent], check=True)
    found = subprocess.run(
        [sys.executable, "-c", _LOAD, folder, *options],
        check=True,
        capture_output=True,
        env=environment,
    )
    return json.loads(found.stdout)


@pytest.mark.exhaustive
def test_no_float_copy_of_a_quantized_model_is_made(tmp_path: Path) -> None:
    """50 million weights in 35 MB of codes and scales, which are 200 MB in float32."""
    measured = _measured(_WRITE, tmp_path / "codes")
    assert 30e6 < measured["weights"] < 45e6
    layer = 512 * 2048  # bytes, at one a code
    assert measured["peak"] < measured["weights"] + 12 * layer, measured
    assert measured["peak"] > 0.8 * measured["weights"], "the watcher missed the load"


@pytest.mark.exhaustive
def test_experts_are_packed_without_a_float_copy(tmp_path: Path) -> None:
    """75 million weights of experts in 40 MB of a file's codes, or rounded as they are read, 150 MB
    in bfloat16: a layer's of a projection at a time, as read, as an array and while packed."""
    codes = _measured(_WRITE_EXPERTS, tmp_path / "codes")
    floats = _measured(_WRITE_EXPERTS, tmp_path / "floats", "int4")
    for measured in (codes, floats):
        assert 40e6 < measured["weights"] < 65e6
        layer = 2 * 16 * 512 * 512  # bytes, in bfloat16
        few = 1 if measured is codes else 5
        assert measured["peak"] < measured["weights"] + few * layer, (codes, floats)
        assert measured["peak"] > 0.8 * measured["weights"], "the watcher missed the load"
