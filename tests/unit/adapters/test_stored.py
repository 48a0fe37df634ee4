"""A quantized directory's own codes under adapters are the numbers in it, or refused."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.models.quantized_models import quantize_folder

from fornax.adapters import LoRA, attach, detach, load_quantized
from fornax.adapters.attach import adapted_modules
from fornax.config.errors import CheckpointError, ConfigError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    create_decoder,
    load_pretrained,
    save_pretrained,
)
from fornax.models.layout import flat_variables
from fornax.quant import quantize

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
LLAMA = DecoderConfig(**SIZES, family="llama")
MOE = DecoderConfig(
    **SIZES,
    family="qwen3_moe",
    qk_norm="head",
    experts=ExpertsConfig(num_experts=3, experts_per_token=2, intermediate_size=128),
)
STORED = LoRA(rank=2, quantize="stored")


def folder_of(path: Path, config: DecoderConfig, scheme: str, dtype: str) -> Path:
    save_pretrained(create_decoder(config, seed=3, dtype=dtype), path / "float")
    quantize(path / "float", path / "few", scheme=scheme)
    return path / "few"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "scheme", "dtype", "params", "sizes"),
    [
        (LLAMA, "w4a16", "bfloat16", "float32", None),
        (MOE, "w4a16", "float16", "float32", None),
        (MOE, "w8a16", "float32", "bfloat16", None),
        (LLAMA, "w4a16", "float32", "float32", {"fsdp": 4, "tensor": 2}),
    ],
)
def test_kernels_are_the_numbers_in_the_files(
    tmp_path: Path,
    config: DecoderConfig,
    scheme: str,
    dtype: str,
    params: str,
    sizes: dict[str, int] | None,
) -> None:
    folder = folder_of(tmp_path, config, scheme, dtype)
    mesh = None if sizes is None else make_mesh(MeshConfig(**sizes))
    place: dict[str, Any] = {"mesh": mesh, "rules": DEFAULT_RULES, "dtype": params}
    model = load_quantized(folder, STORED, rngs=nnx.Rngs(5), **place)
    kernels = [module.kernel.get_value() for _, module in adapted_modules(model)]
    assert {kernel.dtype for kernel in kernels} == {jnp.dtype("uint8" if "4" in scheme else "int8")}
    assert mesh is None or all(kernel.sharding.num_devices == 8 for kernel in kernels)
    detach(model)
    found, wanted = flat_variables(model), flat_variables(load_pretrained(folder, **place))
    assert found.keys() == wanted.keys()
    for path, variable in wanted.items():
        one, other = (np.asarray(each.get_value()) for each in (found[path], variable))
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes(), path


@pytest.mark.slow
def test_codes_that_adapters_do_not_take_are_refused(tmp_path: Path) -> None:
    few = folder_of(tmp_path, LLAMA, "fp8", "float32")
    with pytest.raises(ConfigError, match="fp8 is not held here"):
        load_quantized(few, STORED, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="hold layers/attention/k as floats"):
        load_quantized(tmp_path / "float", STORED, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="is not read from one"):
        attach(load_pretrained(tmp_path / "float"), STORED, rngs=nnx.Rngs(0))
    quantize_folder(tmp_path / "float", tmp_path / "gptq", "gptq")
    with pytest.raises(CheckpointError, match="zero points other than 8"):
        load_quantized(tmp_path / "gptq", STORED, rngs=nnx.Rngs(0))
    quantize_folder(tmp_path / "float", tmp_path / "order", "gptq-order")
    with pytest.raises(ConfigError, match="in activation order is not held here"):
        load_quantized(tmp_path / "order", STORED, rngs=nnx.Rngs(0))
