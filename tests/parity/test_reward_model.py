"""A saved reward model scores in transformers what it scores here.

Legend: N sequences.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForSequenceClassification

from fornax.adapters import LoRA
from fornax.data import load_tokenizer, train_bpe
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.tune.config import RewardModelConfig
from fornax.tune.policy import read_origin
from fornax.tune.reward_model import RewardModel, save_sequence_classifier, scored
from fornax.tune.splits import codec_of

pytestmark = pytest.mark.parity

PROMPTS = ["red tea is", "blue", "milk is not tea"]
COMPLETIONS = [" good", " bad and poor", " fine"]


def test_scores_are_those_of_transformers(tmp_path: Path):
    train_bpe(["good fine bad poor red blue tea milk " * 20], 280).save(tmp_path / "tokenizer")
    config = DecoderConfig(
        vocab_size=load_tokenizer(tmp_path / "tokenizer").vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        tie_embeddings=False,
    )
    save_pretrained(create_decoder(config, seed=1), tmp_path / "base", tmp_path / "tokenizer")
    run = RewardModelConfig(model=str(tmp_path / "base"), data="", max_length=64, lora=LoRA(rank=4))
    origin = read_origin(run)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = scored(run, origin).pretrained(mesh, DEFAULT_RULES)
    rng = np.random.default_rng(2)
    for path, variable in nnx.iter_graph(model):
        if path and path[-1] == "lora_b":  # adapters that do something
            variable.set_value(jnp.asarray(0.1 * rng.normal(size=variable.shape), jnp.float32))
    judge = RewardModel(
        model=model,
        codec=codec_of(run, origin),
        max_length=64,
        mesh=mesh,
        rules=DEFAULT_RULES,
        tokenizer_path=origin.tokenizer_path,
    )
    found = judge.score(PROMPTS, COMPLETIONS)

    save_sequence_classifier(judge, tmp_path / "hf")
    theirs, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    rows = [judge.codec.completion(p, c).tokens for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    longest = max(map(len, rows))
    pad = theirs.config.pad_token_id
    tokens = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != pad).long()).logits[:, 0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
