"""Oracles: small random transformers models, and their logits. Needs torch and transformers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.xla_flags import xla_flags

os.environ["XLA_FLAGS"] = xla_flags()  # one device: these tests compare numbers, not shardings
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns of every import from trl.experimental
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # oracles that compile take a minute for each function

import numpy as np
import pytest
import torch
import transformers
from tests.long_calls import long_calls

__all__ = ["long_calls"]

transformers.logging.set_verbosity_error()
# The library has this class and its automatic classes do not know it.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)

HfModel = Any


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on which others ran before it in its process."""
    torch.manual_seed(0)


def make_oracle(config: transformers.PreTrainedConfig) -> HfModel:
    """A float32 model with weights large enough that logits are of order one."""
    torch.manual_seed(1)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *_trained_buffers(model)]:
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(scale * torch.randn_like(parameter))
    return model.eval()


def _trained_buffers(model: HfModel) -> list[tuple[str, torch.Tensor]]:
    """Buffers that checkpoints hold: a router's bias for the choice of experts starts at zero."""
    stored = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def oracle_logits(model: HfModel, tokens: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    """The oracle's logits."""
    with torch.no_grad():
        given = {key: torch.from_numpy(np.asarray(value)) for key, value in inputs.items()}
        found = model(input_ids=torch.from_numpy(tokens).long(), use_cache=False, **given)
    return found.logits.float().numpy()


@pytest.fixture
def save_oracle(tmp_path: Path) -> Callable[[HfModel], Path]:
    """Saves an oracle and returns the directory."""

    def save(model: HfModel) -> Path:
        model.save_pretrained(tmp_path / "oracle")
        return tmp_path / "oracle"

    return save
