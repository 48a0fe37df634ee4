"""bfloat16: files are exchanged bit for bit, and its logits are as near to float32's as theirs."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.parity.cases import build
from tests.parity.conftest import make_oracle, oracle_logits

from fornax.models import load_pretrained, save_pretrained

pytestmark = pytest.mark.parity
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 24), dtype=np.int32)


@pytest.mark.parametrize("name", ["llama2", "phi3", "gemma3"])
def test_bfloat16_goes_there_and_back(name: str, save_oracle, tmp_path: Path) -> None:
    config, _ = build(name)
    folder = save_oracle(make_oracle(config).to(torch.bfloat16))
    model = load_pretrained(folder)
    assert model.embed.embedding.dtype == ml_dtypes.bfloat16
    save_pretrained(model, tmp_path / "ours")
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "ours" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == torch.bfloat16
        assert torch.equal(after[key], tensor), key
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.bfloat16


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    """Loaded again, since casting a model would round its rotary frequencies too."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", ["llama2", "gemma2", "olmo2"])
def test_bfloat16_logits_are_as_near_as_theirs(name: str, save_oracle) -> None:
    """Both round on the way; neither may be further from float32 than the other by half."""
    config, _ = build(name)
    folder = save_oracle(make_oracle(config).to(torch.bfloat16))
    exact = oracle_logits(_loaded(folder, torch.float32), TOKENS)
    theirs = oracle_logits(_loaded(folder, torch.bfloat16), TOKENS) - exact
    ours = np.asarray(load_pretrained(folder)(TOKENS)) - exact
    assert np.sqrt(np.mean(theirs**2)) > 1e-3, "nothing was rounded"
    assert np.sqrt(np.mean(ours**2)) < 1.5 * np.sqrt(np.mean(theirs**2))
    widened = np.asarray(load_pretrained(folder, dtype="float32")(TOKENS))
    np.testing.assert_allclose(widened, exact, atol=1e-4)
