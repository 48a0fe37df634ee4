"""Adapters against PEFT: its model with ours, ours with its, and both merged.

Legend: B sequences, T tokens.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from tests.parity.conftest import oracle_logits
from tests.parity.test_llm_families import untied_oracle

from fornax.adapters import LoRA, LoRAParam, attach, load_peft, merged, save_peft
from fornax.models import Decoder, load_pretrained, save_pretrained

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT's
]
TOKENS_BT = np.random.default_rng(0).integers(3, 90, (2, 20))
CASES = ("llama-biases", "phi4-mini")
"""One matrix for each projection, with biases; and several projections in one."""


@pytest.fixture(scope="module", params=CASES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A transformers model and its folder."""
    oracle = untied_oracle(request.param)
    folder: Path = tmp_path_factory.mktemp(request.param) / "base"
    oracle.save_pretrained(folder)
    return request.param, oracle, folder


def logits(model: Decoder) -> np.ndarray:
    graphdef, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state: nnx.merge(graphdef, state)(TOKENS_BT))(state))


def stir(model: Decoder) -> None:
    """Adapters as training leaves them: every part away from its start."""
    rng = np.random.default_rng(7)

    def move(x: jax.Array) -> np.ndarray:
        scale = 0.2 if x.ndim > 2 else 1.0
        return (np.asarray(x) * 1.1 + 0.1 * scale * rng.normal(size=x.shape)).astype(np.float32)

    nnx.update(model, jax.tree.map(move, nnx.state(model, LoRAParam)))


OURS = {
    "patterns": LoRA(
        rank=4, alpha=6, rank_pattern={"mlp/down": 2}, alpha_pattern={"attention/o": 3}
    ),
    "rslora": LoRA(rank=3, alpha=4, rslora=True, targets=("attention/q", "attention/v", "mlp/up")),
    "dora": LoRA(rank=4, alpha=4, dora=True, targets=("attention/q", "mlp/*")),
}


@pytest.mark.parametrize("kind", OURS)
def test_peft_loads_what_we_save(base: Any, kind: str, tmp_path: Path) -> None:
    _, oracle, folder = base
    model = load_pretrained(folder)
    attach(model, OURS[kind], rngs=nnx.Rngs(1))
    stir(model)
    save_peft(model, tmp_path / "adapter", base=folder)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path / "adapter").eval()
    expected = oracle_logits(theirs, TOKENS_BT)
    assert np.abs(expected - oracle_logits(oracle, TOKENS_BT)).max() > 0.05, "it changes nothing"
    np.testing.assert_allclose(logits(model), expected, atol=2e-4, rtol=1e-4)
    _compare_weights(merged(model), theirs, tmp_path)


def _compare_weights(ours: Decoder, theirs: Any, folder: Path) -> None:
    whole = theirs.merge_and_unload()
    save_pretrained(ours, folder / "merged")
    again = type(whole).from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    for name, value in whole.state_dict().items():
        np.testing.assert_allclose(again[name], value, atol=1e-5, rtol=1e-5, err_msg=name)


def _linear(family: str) -> list[str]:
    if family.startswith("phi"):
        return ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    return ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


THEIRS: dict[str, Callable[[str], dict[str, Any]]] = {
    "patterns": lambda family: {
        "target_modules": _linear(family),
        "rank_pattern": {"o_proj": 2, "layers.0.mlp.down_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 11, "down_proj": 3},
    },
    "rslora-one-layer": lambda family: {
        "target_modules": _linear(family)[:1],
        "use_rslora": True,
        "layers_to_transform": [1],
    },
    "dora": lambda family: {"target_modules": _linear(family), "use_dora": True},
}


@pytest.mark.parametrize("kind", THEIRS)
def test_we_load_what_peft_saves(base: Any, kind: str, tmp_path: Path) -> None:
    family, oracle, folder = base
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **THEIRS[kind](family))
    theirs = peft.get_peft_model(copy.deepcopy(oracle), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.1).add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_pretrained(folder)
    load_peft(tmp_path / "adapter", model)
    expected = oracle_logits(theirs, TOKENS_BT)
    assert np.abs(expected - oracle_logits(oracle, TOKENS_BT)).max() > 0.05, "it changes nothing"
    np.testing.assert_allclose(logits(model), expected, atol=2e-4, rtol=1e-4)
    _compare_weights(merged(model), theirs, tmp_path)


EXPERTS = ("experts/gate", "experts/up", "experts/down")

of_parameters = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
)
"""PEFT looks for a pattern's keys among modules alone, though it heeds those of parameters."""


@pytest.fixture(scope="module", params=["mixtral", "qwen3-moe"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    oracle = untied_oracle(request.param)
    folder: Path = tmp_path_factory.mktemp(request.param) / "base"
    oracle.save_pretrained(folder)
    return oracle, folder


@of_parameters
@pytest.mark.parametrize(
    "config",
    [LoRA(rank=4, alpha=6), LoRA(rank=3, alpha=4, targets=EXPERTS)],
    ids=["default", "experts"],
)
def test_peft_loads_what_we_save_of_experts(mixture: Any, config: LoRA, tmp_path: Path) -> None:
    """Ours are of single experts; PEFT makes them into those of all experts' tensors.

    It doubles rank and alpha where it joins gate and up, which is wrong for rsLoRA.
    """
    oracle, folder = mixture
    model = load_pretrained(folder)
    attach(model, config, rngs=nnx.Rngs(1))
    stir(model)
    save_peft(model, tmp_path / "adapter", base=folder)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path / "adapter").eval()
    expected = oracle_logits(theirs, TOKENS_BT)
    assert np.abs(expected - oracle_logits(oracle, TOKENS_BT)).max() > 0.05, "it changes nothing"
    np.testing.assert_allclose(logits(model), expected, atol=2e-4, rtol=1e-4)
    again = load_pretrained(folder)
    load_peft(tmp_path / "adapter", again)
    np.testing.assert_allclose(logits(again), expected, atol=2e-4, rtol=1e-4)


OF_TENSORS: dict[str, dict[str, Any]] = {
    "both": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"experts.gate_up_proj": 3},
    },
    "one, rslora": {
        "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj"],
        "use_rslora": True,
    },
}


@of_parameters
@pytest.mark.parametrize("kind", OF_TENSORS)
def test_we_load_what_peft_saves_of_experts(mixture: Any, kind: str, tmp_path: Path) -> None:
    oracle, folder = mixture
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **OF_TENSORS[kind])
    theirs = peft.get_peft_model(copy.deepcopy(oracle), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.1).add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_pretrained(folder)
    load_peft(tmp_path / "adapter", model)
    expected = oracle_logits(theirs, TOKENS_BT)
    assert np.abs(expected - oracle_logits(oracle, TOKENS_BT)).max() > 0.05, "it changes nothing"
    np.testing.assert_allclose(logits(model), expected, atol=2e-4, rtol=1e-4)
