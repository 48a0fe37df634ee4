"""Rotated weights: a plain decoder in float64 computes the same logits with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fornax.checkpoint.safetensors_file import find_tensors
from fornax.config.errors import ConfigError
from fornax.models import DecoderConfig, create_decoder, open_pretrained, save_pretrained
from fornax.quant.leaves import Leaf, find_leaves
from fornax.quant.rotation import find_rotations, make_rotation

CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,  # three times a power of two
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "qkv_bias": True,
    "attention_output_bias": True,
}
TOKENS = np.random.default_rng(0).integers(0, 40, 12)


@pytest.mark.parametrize("size", [1, 5, 8, 24, 128, 320])
def test_rotations_are_orthogonal_and_spread_each_number(size: int) -> None:
    rotation = make_rotation(size, np.random.default_rng(size))
    whole = rotation.after(np.eye(size))
    np.testing.assert_allclose(whole @ whole.T, np.eye(size), atol=1e-13)
    w = np.random.default_rng(1).normal(size=(3, size, 7))
    np.testing.assert_allclose(rotation.before(w), whole.T @ w, atol=1e-12)
    np.testing.assert_allclose(rotation.before(w[0, :, 0]), whole.T @ w[0, :, 0], atol=1e-12)
    if size & (size - 1) == 0:
        np.testing.assert_allclose(np.abs(whole), size**-0.5, rtol=1e-13)


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def forward(w: dict[str, np.ndarray]) -> np.ndarray:
    """Logits [T, V] of a Llama with biases, without positions."""
    x, T = w["model.embed_tokens.weight"][TOKENS], len(TOKENS)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    for layer in range(2):
        at = f"model.layers.{layer}."
        y = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (linear(f"{at}self_attn.{part}_proj", y).reshape(T, -1, 24) for part in "qkv")
        k, v = (np.repeat(each, 2, axis=1) for each in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / 24**0.5
        scores = np.where(np.tri(T) > 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        gathered = np.einsum("nts,snh->tnh", shares, v).reshape(T, -1)
        x = x + linear(f"{at}self_attn.o_proj", gathered)
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (linear(f"{at}mlp.{part}_proj", y) for part in ("gate", "up"))
        x = x + linear(f"{at}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def leaves_of(folder: Path) -> tuple[DecoderConfig, list[Leaf]]:
    stored = open_pretrained(folder, dtype="float32")
    return stored.model.config, find_leaves(stored, find_tensors(folder))


def test_logits_in_float64_are_those_of_the_model(tmp_path: Path) -> None:
    save_pretrained(create_decoder(DecoderConfig(**CONFIG)), tmp_path / "m")
    rng = np.random.default_rng(5)
    w = {
        name: rng.normal(size=tensor.shape) * (0.3 if len(tensor.shape) == 2 else 1)
        for name, tensor in find_tensors(tmp_path / "m").items()
    }
    save_file(w, tmp_path / "m/model.safetensors")
    config, leaves = leaves_of(tmp_path / "m")
    rotations = find_rotations(config, leaves, seed=0)
    made = {leaf.tensor.name: rotations.rotated(leaf, leaf.tensor.view()) for leaf in leaves}
    q = "model.layers.0.self_attn.q_proj.bias"
    assert [name for name in made if made[name] is None] == [
        name for name in made if name.endswith(("q_proj.bias", "k_proj.bias"))
    ]
    assert made[q] is None
    rotated = {name: w[name] if made[name] is None else made[name] for name in w}
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        np.testing.assert_array_equal(rotated[name], 1)
    wanted = forward(w)
    np.testing.assert_allclose(forward(rotated), wanted, atol=1e-11 * wanted.std())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tie_embeddings": True}, "its table of embeddings is the output projection too"),
        ({"norm_placement": "sandwich"}, "norms behind its layers"),
    ],
)
def test_models_that_cannot_be_rotated_are_refused(
    options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = DecoderConfig(**{**CONFIG, "tie_embeddings": False, **options})
    with pytest.raises(ConfigError, match=f"cannot be rotated: {why}"):
        find_rotations(config, [], seed=0)
