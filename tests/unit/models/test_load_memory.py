"""Loading needs the model's memory and one tensor's, measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc"
)

_LOAD = """
import gc, json, sys
import jax
from flax import nnx
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import load_pretrained
from tests.peak import peak_of

def load():
    mesh = make_mesh(MeshConfig()) if sys.argv[2] == "mesh" else None
    return load_pretrained(sys.argv[1], "float32", mesh)

load()  # programs compiled, threads started
gc.collect()
model, peak = peak_of(load)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
largest = model.embed.embedding.nbytes
print(json.dumps({"peak": peak, "model": size, "largest": largest}))
"""

_SAVE = """
import sys
from fornax.models import DecoderConfig, create_decoder, save_pretrained
sizes = dict(hidden_size=512, intermediate_size=2048, num_heads=8, vocab_size=8192, num_layers=8)
save_pretrained(create_decoder(DecoderConfig(**sizes)), sys.argv[1])
"""


_QUANTIZE = """
import json, pathlib, sys
import ml_dtypes, numpy as np
from safetensors.numpy import load_file
from tests.unit.models.quantized_files import write_file
source, folder = map(pathlib.Path, sys.argv[1:])
tensors = load_file(source / "model.safetensors")
for name in [name for name in tensors if "_proj" in name]:
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    blocks = [size // 128 for size in tensors[name].shape]
    tensors[f"{name}_scale_inv"] = np.ones(blocks, np.float32)
folder.mkdir()
write_file(folder / "model.safetensors", tensors)
values = json.loads((source / "config.json").read_text())
values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
(folder / "config.json").write_text(json.dumps(values))
"""


_BLOCKS = """
import gc, json, pathlib, sys
import numpy as np
from fornax.llm.config import EngineConfig
from fornax.llm.weights import load_weights
from tests.gguf_blocks import random_blocks
from tests.peak import peak_of
from tests.unit.gguf.files import TINY, tiny_tokenizer, write

width, hidden, layers = 1024, 4096, 8
sizes = {"embedding_length": width, "feed_forward_length": hidden, "block_count": layers}
sizes |= {"attention.head_count": 16, "attention.head_count_kv": 8, "rope.dimension_count": 64}
shapes = {"attn_q": (width, width), "attn_k": (512, width), "attn_v": (512, width)}
shapes |= {"attn_output": (width, width), "ffn_gate": (hidden, width)}
shapes |= {"ffn_up": (hidden, width), "ffn_down": (width, hidden)}
tensors = {"token_embd.weight": ("Q6_K", random_blocks("Q6_K", 300, width))}
tensors["output_norm.weight"] = np.ones(width, np.float32)
for layer in range(layers):
    for norm in ("attn_norm", "ffn_norm"):
        tensors[f"blk.{layer}.{norm}.weight"] = np.ones(width, np.float32)
    for part, shape in shapes.items():
        kind = "Q6_K" if part == "ffn_down" and layer % 2 else "Q4_K"
        tensors[f"blk.{layer}.{part}.weight"] = (kind, random_blocks(kind, *shape))
metadata = {**TINY, **tiny_tokenizer(), **{f"llama.{key}": x for key, x in sizes.items()}}
path = write(pathlib.Path(sys.argv[1]) / "model.gguf", metadata, tensors)
del tensors

def load():
    return load_weights(path, EngineConfig(dtype="float32"))

load()
gc.collect()
weights, peak = peak_of(load)
print(json.dumps({"peak": peak, "model": weights.nbytes, "largest": width * hidden}))
"""


@pytest.mark.exhaustive
def test_peak_memory_of_blocks_is_the_packed_model_and_one_layers_codes(tmp_path: Path) -> None:
    """75 MB; a layer's matrix has 4 million weights, whose codes exist unpacked a few times."""
    found = subprocess.run(
        [sys.executable, "-c", _BLOCKS, tmp_path],
        check=True,
        capture_output=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    measured = json.loads(found.stdout)
    assert 70e6 < measured["model"] < 85e6
    assert measured["peak"] < measured["model"] + 6 * measured["largest"] + 4e6, measured
    assert measured["peak"] > 0.8 * measured["model"], "the watcher missed the load"


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["one", "mesh", "quantized"])
def test_peak_memory_is_the_model_and_one_tensor(
    where: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """168 MB of weights, 17 MB the largest tensor; a copy of a stack of layers would be 34 MB."""
    folder = tmp_path_factory.getbasetemp() / "memory"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed is given back
    if not folder.exists():
        subprocess.run([sys.executable, "-c", _SAVE, folder], check=True)
    if where == "quantized":
        source, folder = folder, folder.with_name("quantized-memory")
        subprocess.run([sys.executable, "-c", _QUANTIZE, source, folder], check=True)
    found = subprocess.run(
        [sys.executable, "-c", _LOAD, folder, where],
        check=True,
        capture_output=True,
        env=environment,
    )
    measured = json.loads(found.stdout)
    assert measured["model"] > 150e6
    slack = 4e6  # allocator and bookkeeping
    assert measured["peak"] < measured["model"] + measured["largest"] + slack, measured
    assert measured["peak"] > 0.8 * measured["model"], "the watcher missed the load"
