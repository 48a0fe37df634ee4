"""Every Python block of the models guide runs, and does what the text beside it says."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.models import DecoderConfig, create_decoder, load_pretrained, save_pretrained
from fornax.models.families.reader import ConfigReader

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "models.md"
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    qkv_bias=True,
    tie_embeddings=True,
    initializer_range=0.3,
)


@pytest.mark.slow
def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "Qwen2.5-0.5B"
    save_pretrained(create_decoder(CONFIG), folder)
    (folder / "tokenizer.json").write_text("{}")
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    for number, block in enumerate(blocks):
        exec(compile(block, f"{GUIDE.name} block {number}", "exec"), names)

    assert (tmp_path / "models" / "mine" / "tokenizer.json").exists()
    assert load_pretrained("models/mine").embed.embedding.dtype == jnp.bfloat16

    original, tokens = load_pretrained(folder), jnp.arange(1, 9)[None]
    np.testing.assert_allclose(names["tuned"](tokens), original(tokens), atol=1e-5)
    shapes = {leaf.shape for leaf in jax.tree.leaves(names["adapters"])}
    assert shapes == {(2, 16, 8), (2, 8, 2, 8)}

    large = names["large"]
    assert large(tokens).shape == (1, 8, 96)
    np.testing.assert_array_equal(large.layers.mlp.up.kernel[:2], original.layers.mlp.up.kernel)
    np.testing.assert_array_equal(large.embed.embedding[:32], original.embed.embedding)

    mine = names["MINE"]
    config = dataclasses.replace(CONFIG, qkv_bias=False, qk_norm="head")
    back = mine.read(ConfigReader(mine.write(config)))
    assert (back.qk_norm, back.tie_embeddings, back.hidden_size) == ("head", True, 16)
