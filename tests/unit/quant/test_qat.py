"""Quantization-aware training rounds exactly what `fornax quantize` rounds, or refuses."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.mesh import MeshConfig
from fornax.models import (
    Decoder,
    DecoderConfig,
    ExpertsConfig,
    config_from_hf,
    create_decoder,
    load_pretrained,
    save_pretrained,
)
from fornax.models.layout import flat_variables
from fornax.quant import QuantConfig, plan_qat, quantize
from fornax.quant.qat import RoundedProduct
from fornax.quant.rounding import dequantize, round_matrix, spread
from fornax.quant.schemes import Inputs, Scheme
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import prepare
from fornax.tune.config import (
    DistillConfig,
    GRPOConfig,
    OnPolicy,
    RewardModelConfig,
    SFTConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
MODELS = {
    "llama": DecoderConfig(**SIZES, family="llama", tie_embeddings=True),
    "phi3": DecoderConfig(**SIZES, family="phi3"),
    "narrow": DecoderConfig(**{**SIZES, "hidden_size": 96}, family="llama"),
    "qwen3_moe": DecoderConfig(
        **SIZES,
        family="qwen3_moe",
        qk_norm="head",
        experts=ExpertsConfig(num_experts=3, experts_per_token=2, intermediate_size=128),
    ),
    "gpt_oss": config_from_hf(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_act": "silu",
            "vocab_size": 384,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_experts_per_tok": 2,
            "num_local_experts": 3,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
    ),
}
"""gpt-oss has the gates and ups of all experts, in turns, in one tensor of a layer."""


def arrays(model: Decoder) -> dict[str, np.ndarray]:
    return {path: np.asarray(each.get_value()) for path, each in flat_variables(model).items()}


def rounded(model: Decoder, config: QuantConfig) -> dict[str, np.ndarray]:
    quantizer = plan_qat(model, config)
    assert quantizer is not None
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    found = jax.jit(quantizer.round)(nnx.to_pure_dict(params))
    return arrays(nnx.merge(graphdef, found, rest))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "dtype", "rules", "group"),
    [
        ("llama", "w4a16", "bfloat16", ("layers/0/=w8a16", "layers/1/mlp/down=keep"), None),
        ("qwen3_moe", "w4a16", "float32", ("lm_head=w8a16", "embed=fp8", "1/experts/ro=w8a16"), 64),
        ("phi3", "w3a16", "bfloat16", (), 32),
        ("narrow", "w8a16", "float32", ("layers/0/=w4a16", "layers/1/attention=keep"), 32),
        ("llama", "fp8-block", "float32", (), None),
        pytest.param("llama", "mxfp4", "bfloat16", (), None, marks=pytest.mark.exhaustive),
        ("gpt_oss", "mxfp4", "bfloat16", (), None),
        ("gpt_oss", "w4a16", "float32", ("lm_head=w8a16", "1/experts/down=keep"), 128),
        pytest.param("qwen3_moe", "w8a8", "bfloat16", (), None, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "fp8", "float32", (), None, marks=pytest.mark.exhaustive),
    ],
)
def test_what_training_sees_is_what_is_read_from_the_file(
    tmp_path: Path, name: str, scheme: str, dtype: str, rules: tuple[str, ...], group: int | None
) -> None:
    model = create_decoder(MODELS[name], seed=2, dtype=dtype)
    save_pretrained(model, tmp_path / "float")
    options = {"rules": rules, "group_size": group}
    report = quantize(tmp_path / "float", tmp_path / "few", scheme=scheme, **options)
    config = QuantConfig(qat=scheme, **options)
    found, wanted = rounded(model, config), arrays(load_pretrained(tmp_path / "few"))
    assert found.keys() == wanted.keys()
    for path, values in found.items():
        assert values.tobytes() == wanted[path].astype(values.dtype).tobytes(), path
    quantizer = plan_qat(model, config)
    assert quantizer is not None
    matrices = {key: why for key, why in report.kept.items() if key in quantizer.kept}
    assert matrices == quantizer.kept
    before = arrays(model)
    assert {path for path in found if (found[path] != before[path]).any()} == {
        *quantizer.parameters
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("kind", "group"), [("int", None), ("float", 128)])
def test_activations_are_rounded_row_by_row_and_gradients_pass(
    kind: str, group: int | None, dtype: Any
) -> None:
    rule = Inputs(type=kind, bits=8, group=group)
    scheme = Scheme(name="rows", type=kind, bits=8, layout="int-quantized", group=group)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 4, 48)).astype(dtype)
    w = rng.standard_normal((4, 48, 16)).astype(dtype)
    weight = RoundedProduct(jnp.asarray(w), rule)
    y, pull = jax.vjp(lambda x, weight: weight.linear(x, 2), jnp.asarray(x), weight)
    rows = x.reshape(10, 192)
    codes = round_matrix(rows, scheme, np.dtype(np.float32))
    seen = dequantize(codes.values_OI, *spread(codes.grid, scheme, rows.shape)).astype(dtype)
    matrix = w.reshape(192, 16).astype(np.float64)
    wanted = seen.astype(np.float64) @ matrix
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(y.reshape(10, 16), wanted, atol=tolerance * scale)
    dy = rng.standard_normal(y.shape).astype(dtype)
    dx, dw = pull(jnp.asarray(dy))
    flat = dy.reshape(10, 16).astype(np.float64)
    np.testing.assert_allclose(
        dx.reshape(10, 192), flat @ matrix.T, atol=tolerance * np.abs(flat @ matrix.T).max()
    )
    of_w = seen.astype(np.float64).T @ flat
    np.testing.assert_allclose(dw.array.reshape(192, 16), of_w, atol=tolerance * np.abs(of_w).max())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"qat": "w4a16", "scheme": "int8"}, "both set"),
        ({"qat": "w4a16-gptq"}, "chosen by text.*use one of w8a16, w4a16"),
        ({"qat": "smoothquant"}, "chosen by text"),
        ({"qat": "nvfp4"}, "measured on text"),
        ({"qat": "nvfp4a16"}, "one number of several matrices"),
        ({"qat": "w4a4"}, "rotates the model"),
        ({"qat": "w4a1"}, "did you mean w4a16"),
        ({"rules": ("a=keep",)}, "qat is null"),
        ({"qat": "w4a16", "rules": ("a",)}, "PATTERN=SCHEME"),
        ({"group_size": 32}, "group_size=32: only qat reads group_size, and qat is null"),
        ({"qat": "w4a16", "group_size": 16}, "must be one of 32, 64, 128"),
        ({"qat": "fp8", "group_size": 64}, "fp8 has no groups of a size"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        QuantConfig(**given)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("llama", {"qat": "w4a16", "rules": ("nothing=keep",)}, "finds no matrix"),
        ("llama", {"qat": "w4a16", "rules": ("mlp=w4a16-awq",)}, "chosen by text, after training"),
        ("llama", {"qat": "w8a8", "rules": ("layers/0/=keep",)}, "another scheme"),
        ("phi3", {"qat": "w4a16", "rules": ("lm_head=w8a8",)}, "outside the layers"),
        ("phi3", {"qat": "fp8-block"}, "reach from one of them into the next"),
    ],
)
def test_a_model_that_cannot_be_rounded_so_is_refused(
    name: str, given: dict[str, Any], says: str
) -> None:
    model = nnx.eval_shape(lambda: Decoder(MODELS[name], rngs=nnx.Rngs(0), dtype=jnp.float32))
    with pytest.raises(ConfigError, match=says):
        plan_qat(model, QuantConfig(**given))


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (SFTConfig, {"lora": LoRA()}, "lora do not go together"),
        (GRPOConfig, {}, "drawn by float weights"),
        (RewardModelConfig, {}, "no reward model"),
        (DistillConfig, {"teacher": "t", "on_policy": OnPolicy()}, "on_policy do not go together"),
    ],
)
def test_a_method_without_it_says_so(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind(model="m", data="d", **{"quant": QuantConfig(qat="w4a16"), **given})


def test_rows_that_a_mesh_divides_are_refused() -> None:
    config = TrainConfig(
        model=MODELS["qwen3_moe"],
        mesh=MeshConfig(tensor=2),
        quant=QuantConfig(qat="w8a8"),
    )
    with pytest.raises(ConfigError, match=r"set mesh\.tensor to 1"):
        prepare(config, pretrain_task(config, read_data=False), Ledger())
