"""What a directory says about its model, without weights."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from tests.unit.llm.test_weights import CPU, floats
from tests.unit.models.quantized_models import quantize_folder
from tests.unit.plan.serving.conftest import MODELS, write_config

from fornax.config.errors import CheckpointError, ConfigError
from fornax.llm.config import EngineConfig
from fornax.llm.weights import load_weights
from fornax.models import create_decoder, num_parameters, save_pretrained
from fornax.plan.serving.engine import described_weights
from fornax.plan.serving.model import read_model


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_config_alone_is_enough(tmp_path: Path, keys: dict[str, Any], dtype: str) -> None:
    found = read_model(write_config(tmp_path / "m", MODELS["llama"], **keys))
    assert found.config.hidden_size == MODELS["llama"].hidden_size
    assert found.dtype == dtype
    assert found.parameters == num_parameters(MODELS["llama"])
    assert "no weights were read" in found.source


def test_headers_of_weights_say_the_dtype(tmp_path: Path) -> None:
    save_pretrained(create_decoder(MODELS["tied"], dtype=jnp.float32), tmp_path / "m")
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**values, "torch_dtype": "bfloat16"}))
    assert read_model(tmp_path / "m").dtype == "float32"


@pytest.mark.slow
def test_quantized_weights_count_as_they_are_served(tmp_path: Path) -> None:
    folder = quantize_folder(floats(tmp_path / "floats", "llama"), tmp_path / "gptq", "gptq")
    config = EngineConfig(dtype="bfloat16")
    described = described_weights(read_model(folder, "bfloat16"), config, CPU)
    assert described.nbytes == load_weights(folder, config).nbytes
    (folder / "model.safetensors").unlink()
    assert not read_model(folder, "bfloat16").code_formats


def test_half_precision_asks_for_a_dtype(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", MODELS["llama"], torch_dtype="float16")
    with pytest.raises(ConfigError, match=r"float16.*--dtype bfloat16"):
        read_model(folder)
    assert read_model(folder, "bfloat16").dtype == "bfloat16"


def test_says_what_is_wrong_with_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json alone is enough"):
        read_model(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        read_model(write_config(tmp_path / "m", MODELS["llama"]) / "config.json")
    folder = write_config(tmp_path / "n", MODELS["llama"], architectures=["BloomForCausalLM"])
    with pytest.raises(ConfigError, match=r"BloomForCausalLM.*LlamaForCausalLM"):
        read_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_model(folder)
