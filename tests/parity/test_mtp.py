"""Files with modules for multi-token prediction: transformers loads the model from them."""

from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from flax import nnx
from tests.parity.conftest import oracle_logits
from tests.unit.models.test_mtp import FILES

from fornax.models import create_decoder, load_pretrained, save_pretrained

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    "name", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.exhaustive)]
)
def test_modules_in_files_leave_the_model_what_it_is(name: str, tmp_path: Path) -> None:
    """The oracle has no modules: it must find all else, and the same logits."""
    model = create_decoder(FILES[name], seed=2)
    rng = np.random.default_rng(1)
    nnx.update(
        model,
        jax.tree.map(
            lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), nnx.state(model)
        ),
    )
    save_pretrained(load_pretrained(_saved(model, tmp_path / "one"), mtp=True), tmp_path / "two")
    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "two",
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    tokens = rng.integers(3, 32, (2, 20), dtype=np.int32)
    theirs = oracle_logits(oracle.eval(), tokens)
    assert theirs.std() > 0.3
    np.testing.assert_allclose(nnx.jit(model)(tokens), theirs, atol=1e-4)


def _saved(model: nnx.Module, folder: Path) -> Path:
    save_pretrained(model, folder)
    return folder
