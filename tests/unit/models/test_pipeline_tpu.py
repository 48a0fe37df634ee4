"""Pipeline stages on TPU chips: that the TPU compiler takes a step's gradients."""

import importlib.util
import subprocess
import sys

import pytest

from fornax.config.environment import for_child, tpu_compiler

_COMPILE = """
import jax, jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from fornax import kernels
from fornax.mesh import (
    DEFAULT_RULES, MeshConfig, make_mesh, named_sharding, tree_shardings, use_mesh)
from fornax.models import Decoder, DecoderConfig, PipelineConfig

config = DecoderConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_heads=4, num_kv_heads=4,
    num_layers=5)
topology = topologies.get_topology_desc(topology_name="v6e:2x2", platform="tpu")
mesh = make_mesh(MeshConfig(fsdp=2, stage=2), topology.devices[:4])
make = lambda: Decoder(config, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16)
graphdef, state = nnx.split(nnx.eval_shape(make))
shardings = tree_shardings(state, mesh, DEFAULT_RULES)
state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
rows = named_sharding(mesh, ("batch", "length"), DEFAULT_RULES)
tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32, sharding=rows)

def loss(state, tokens):
    pipeline = PipelineConfig(microbatches=4, repeats=2)
    x = nnx.merge(graphdef, state).hidden(tokens, remat="full", pipeline=pipeline)
    return jnp.sum(jnp.square(x.astype(jnp.float32)))

with kernels.target_platform("tpu"), use_mesh(mesh), kernels.recording_choices() as choices:
    lowered = jax.jit(jax.grad(loss), out_shardings=shardings).lower(state, tokens)
assert "splash" in {choice.implementation for choice in choices}, list(choices)
text = lowered.compile().as_text()
assert "collective-permute" in text
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.tpu
@pytest.mark.slow
def test_tpu_compiler_takes_a_step_in_stages_on_four_chips() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=for_child(tpu_compiler("v6e-4")),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
