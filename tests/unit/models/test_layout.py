"""Tensors that hold all experts of a layer: where each expert's values lie in the file."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tests.cases import one_in

from fornax.config.errors import CheckpointError
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import Decoder, config_from_hf, create_decoder, load_pretrained, save_pretrained

VALUES = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 131_072,
    "hidden_act": "silu",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Decoder, Path]:
    """A model whose biases and sinks are not zeros, and its files."""
    model = create_decoder(config_from_hf(VALUES))
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, drawn))
    save_pretrained(model, tmp_path / "model")
    return model, tmp_path / "model"


@pytest.mark.slow
def test_gate_and_up_take_turns(saved: tuple[Decoder, Path]) -> None:
    model, folder = saved
    stored = load_file(folder / "model.safetensors")
    experts = model.layers.experts
    for layer in range(3):
        start = f"model.layers.{layer}.mlp.experts"
        whole = stored[f"{start}.gate_up_proj"]
        assert whole.shape == (4, 16, 48)
        np.testing.assert_array_equal(whole[2, :, 0::2], experts.gate.kernel[layer, 2])
        np.testing.assert_array_equal(whole[2, :, 1::2], experts.up.kernel[layer, 2])
        biases = stored[f"{start}.gate_up_proj_bias"]
        np.testing.assert_array_equal(biases[3, 1::2], experts.up.bias[layer, 3])
        np.testing.assert_array_equal(stored[f"{start}.down_proj"], experts.down.kernel[layer])


@pytest.mark.parametrize("sizes", one_in(2, [{"fsdp": 2, "expert": 2, "tensor": 2}, None]), ids=str)
def test_they_are_read_back(saved: tuple[Decoder, Path], sizes: dict[str, int] | None) -> None:
    model, folder = saved
    mesh = None if sizes is None else make_mesh(MeshConfig(**sizes))
    again = load_pretrained(folder, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_another_shape_is_refused_by_name(saved: tuple[Decoder, Path]) -> None:
    _, folder = saved
    file = folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: np.ascontiguousarray(tensors[name].swapaxes(1, 2))}, file)
    with pytest.raises(CheckpointError, match=r"gate_up_proj expected \[4, 16, 48\]"):
        load_pretrained(folder)
