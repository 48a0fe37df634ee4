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
import gc, json, sys, threading, time
from pathlib import Path
import jax
from flax import nnx
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import load_pretrained

def anonymous():  # what the process itself holds; the mapped file belongs to the page cache
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def load():
    mesh = make_mesh(MeshConfig()) if sys.argv[2] == "mesh" else None
    return load_pretrained(sys.argv[1], mesh=mesh)

load()  # programs compiled, threads started
gc.collect()
before = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
watcher = threading.Thread(target=watch)
watcher.start()
model = load()
done = True
watcher.join()
size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
largest = model.embed.embedding.nbytes
print(json.dumps({"peak": peak - before, "model": size, "largest": largest}))
"""

_SAVE = """
import sys
from fornax.models import DecoderConfig, create_decoder, save_pretrained
sizes = dict(hidden_size=512, intermediate_size=2048, num_heads=8, vocab_size=8192, num_layers=8)
save_pretrained(create_decoder(DecoderConfig(**sizes)), sys.argv[1])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["one", "mesh"])
def test_peak_memory_is_the_model_and_one_tensor(
    where: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """168 MB of weights, 17 MB the largest tensor; a copy of a stack of layers would be 34 MB."""
    folder = tmp_path_factory.getbasetemp() / "memory"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed is given back
    if not folder.exists():
        subprocess.run([sys.executable, "-c", _SAVE, folder], check=True)
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
