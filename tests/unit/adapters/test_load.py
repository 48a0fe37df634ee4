"""Quantized while it is read: the arrays of quantizing afterwards, without the memory of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.adapters import LoRA, attach, load_quantized
from fornax.config.errors import ConfigError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.models import DecoderConfig, create_decoder, load_pretrained, save_pretrained

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    tie_embeddings=False,
    family="llama",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    save_pretrained(create_decoder(CONFIG, seed=3), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "sizes"),
    [
        (LoRA(rank=2, quantize="nf4", quantize_block=16), None),
        (LoRA(rank=2, quantize="int8", dora=True, targets=("mlp/*",)), {"fsdp": 4, "tensor": 2}),
        (LoRA(rank=2, quantize="int4", dropout=0.1), {"fsdp": 2, "data": 4}),
    ],
)
def test_it_is_what_attaching_to_the_whole_model_makes(
    folder: Path, lora: LoRA, sizes: dict[str, int] | None
) -> None:
    mesh = None if sizes is None else make_mesh(MeshConfig(**sizes))
    place: dict[str, Any] = {"mesh": mesh, "rules": DEFAULT_RULES, "dtype": "float32"}
    whole = load_pretrained(folder, **place)
    attach(whole, lora, rngs=nnx.Rngs(5))
    found = load_quantized(folder, lora, rngs=nnx.Rngs(5), **place)
    assert type(found.layers.mlp.up) is type(whole.layers.mlp.up)
    expected = dict(nnx.to_flat_state(nnx.state(whole)))
    given = dict(nnx.to_flat_state(nnx.state(found)))
    assert given.keys() == expected.keys()
    for path, variable in expected.items():
        one, other = given[path].get_value(), variable.get_value()
        assert type(given[path]) is type(variable), path
        assert given[path].get_metadata() == variable.get_metadata(), path
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        assert mesh is None or "lora" in str(path) or one.sharding.num_devices == 8


def test_without_a_format_it_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nf4, int8, int4 or stored"):
        load_quantized(folder, LoRA(rank=2), rngs=nnx.Rngs(0))


LARGE = DecoderConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=2048,
    num_layers=12,
    num_heads=8,
    num_kv_heads=8,
    tie_embeddings=True,
    family="llama",
)
"""50 million parameters, 201 MB in float32."""

CHILD = """
import gc, json, sys
import jax
from flax import nnx
from fornax.adapters import LoRA, load_quantized
from tests.peak import peak_of

def load():
    lora = LoRA(rank=2, quantize="nf4")
    return load_quantized(sys.argv[1], lora, rngs=nnx.Rngs(0), dtype="float32")

load()  # programs compiled, threads started
gc.collect()
model, peak = peak_of(load)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
print(json.dumps({"peak": peak / 1e6, "model": size / 1e6}))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_peak_is_the_quantized_model_and_a_few_layers_of_a_kernel(tmp_path: Path) -> None:
    save_pretrained(create_decoder(LARGE, seed=0, dtype="bfloat16"), tmp_path / "large")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "large")]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed is given back
    done = subprocess.run(command, capture_output=True, check=True, env=environment, timeout=300)
    found = json.loads(done.stdout)
    layer = LARGE.hidden_size * LARGE.intermediate_size * 4 / 1e6
    assert found["model"] < 30
    assert found["peak"] < found["model"] + 8 * layer, found
    assert found["peak"] > 0.8 * found["model"], "the watcher missed the load"
