"""What `fornax quantize` writes: transformers with compressed-tensors computes the same logits."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from safetensors.numpy import save_file
from tests.memory import let_programs_go
from tests.parity.cases import build
from tests.parity.conftest import make_oracle, oracle_logits

from fornax.checkpoint.safetensors_file import find_tensors
from fornax.models import LayerByLayer, load_pretrained, open_pretrained
from fornax.models.layout import flat_variables, num_inputs
from fornax.quant import SCHEMES, quantize
from fornax.quant.inputs import RoundedInputs
from fornax.quant.layers import find_layer_folds, folded
from fornax.quant.leaves import assign, find_leaves
from fornax.quant.rotation import find_rotations
from fornax.quant.rounding import round_matrix
from fornax.quant.schemes import scheme_named
from fornax.quant.statistics import layer_statistics
from fornax.quant.tensors import pack_pairs

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4
"""Of logits, as a share of their deviation: tied tables make them large."""

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CASES: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "tied qwen3": transformers.Qwen3Config(**_SIZES, head_dim=64, tie_word_embeddings=True),
    "phi3, fused": transformers.Phi3Config(**_SIZES, pad_token_id=0, eos_token_id=2),
}


_DEQUANTIZED = transformers.CompressedTensorsConfig(dequantize=True)


@pytest.fixture(autouse=True)
def small_process() -> Iterator[None]:
    """Each case compiles its own programs."""
    yield
    let_programs_go()


def make_text(folder: Path) -> dict[str, Any]:
    """Words, and a tokenizer for them in the model's directory."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0}, unk_token="w0"))
    tokenizer.add_tokens([f"w{number}" for number in range(1, 97)])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "float/tokenizer.json"))
    ids = np.random.default_rng(4).integers(0, 97, 32 * 24)
    line = json.dumps({"text": " ".join(f"w{number}" for number in ids)})
    (folder / "text.jsonl").write_text(line + "\n")
    return {"data": str(folder / "text.jsonl"), "length": 32, "samples": 20}


def check(
    config: transformers.PreTrainedConfig,
    tmp_path: Path,
    dtype: Any,
    how: Any = _DEQUANTIZED,
    **options: Any,
) -> None:
    make_oracle(config).to(dtype).save_pretrained(tmp_path / "float")
    if scheme_named(options["scheme"]).needs_text:
        options |= make_text(tmp_path)
    quantize(tmp_path / "float", tmp_path / "out", **options)
    found = load_pretrained(tmp_path / "out", dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its options are merged with those in config.json
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out",
            dtype=dtype,
            attn_implementation="eager",
            quantization_config=how,
        )
    tokens = np.random.default_rng(0).integers(3, 97, (2, 24), dtype=np.int32)
    # Experts that were dequantized are bfloat16 there, whatever the dtype asked for.
    theirs = theirs.float() if how is _DEQUANTIZED else theirs
    wanted = oracle_logits(theirs.eval(), tokens)
    logits = np.asarray(jax.jit(lambda x: found(x))(tokens))
    assert np.abs(logits - wanted).max() < TOLERANCE * wanted.std()


@pytest.mark.parametrize("scheme", [x for x in SCHEMES if SCHEMES[x].method == "rounding"])
def test_transformers_reads_what_fornax_reads(scheme: str, tmp_path: Path) -> None:
    check(CASES["llama"], tmp_path, torch.float32, scheme=scheme)


@pytest.mark.parametrize("name", ["tied qwen3", "phi3, fused"])
def test_other_models(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, torch.float32, scheme="w4a16")


@pytest.mark.parametrize(
    "name", ["gemma4-inputs", "gpt-oss", "mistral4", "qwen3-next", "qwen3-moe", "mamba2"]
)
def test_layers_one_at_a_time_are_the_model(name: str, tmp_path: Path) -> None:
    """And each weight's product is seen."""
    make_oracle(build(name)[0]).save_pretrained(tmp_path / "m")
    layers, whole = LayerByLayer(open_pretrained(tmp_path / "m")), load_pretrained(tmp_path / "m")
    tokens = np.random.default_rng(0).integers(3, 97, (2, 24), dtype=np.int32)
    x = layers.embed(tokens)
    for index in range(whole.config.num_layers):
        layer = layers.layer(index)
        seen = layers.record(layer, index, x)
        kernels = {path for path in flat_variables(layer) if num_inputs(layer, path)}
        assert seen.keys() == kernels
        x = layers.run(layer, index, x)
    wanted = np.asarray(jax.jit(lambda tokens: whole(tokens))(tokens))
    assert np.abs(np.asarray(layers.logits(x)) - wanted).max() < TOLERANCE * wanted.std()


def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **{**_SIZES, "intermediate_size": 128}, head_dim=64, num_local_experts=4
    )
    check(
        config, tmp_path, torch.float32, transformers.Mxfp4Config(dequantize=True), scheme="mxfp4"
    )


@pytest.mark.parametrize("scheme", ["w4a16", "fp8", "mxfp4a16"])
def test_experts_with_a_tensor_each(scheme: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    check(transformers.Qwen3MoeConfig(**_SIZES, **sizes), tmp_path, torch.float32, scheme=scheme)


@pytest.mark.parametrize("name", ["llama4", "mistral4", "granite-moe", "gemma4-moe"])
def test_tensors_of_all_experts(name: str, tmp_path: Path) -> None:
    """In each family's layout of them; a matrix that is another's has an error of two."""
    make_oracle(build(name)[0]).save_pretrained(tmp_path / "m")
    report = quantize(tmp_path / "m", tmp_path / "out", scheme="w8a8")
    stacked = [
        name for name, tensor in find_tensors(tmp_path / "m").items() if len(tensor.shape) == 3
    ]
    assert stacked
    assert all(report.quantized[name]["error"] < 1e-4 for name in stacked)


FOLDED = ["llama-biases", "gemma2", "phi3", "mixtral", "deepseek-v2", "qwen2-moe", "gpt-oss"]


@pytest.mark.parametrize(
    ("scheme_name", "name"),
    [*(("w4a16-awq", name) for name in FOLDED), ("smoothquant", "gemma2")],
)
def test_scales_leave_the_float_model_as_it_is(scheme_name: str, name: str, tmp_path: Path) -> None:
    config = build(name)[0]
    if name == "llama-biases":
        config.num_key_value_heads = config.num_attention_heads  # values' scales reach o
    oracle = make_oracle(config)
    oracle.save_pretrained(tmp_path / "m")
    scheme = replace(scheme_named(scheme_name), group=None)
    layers = LayerByLayer(open_pretrained(tmp_path / "m", dtype="float32"))
    files = find_tensors(tmp_path / "m")
    leaves = assign(find_leaves(layers.stored, files), scheme, [], layers.config)
    tokens = np.random.default_rng(0).integers(3, 97, (8, 32), dtype=np.int32)
    x, state, scaled = layers.embed(tokens), {}, 0
    for index in range(len(layers.kinds)):
        own = [leaf for leaf in leaves if leaf.layer == index]
        paths = [path.removeprefix("layers/") for leaf in own for path in leaf.parameters]
        seen = layer_statistics(layers, index, [x], dict.fromkeys(paths, True))
        folds = find_layer_folds(layers, index, own, seen)
        for leaf in own:
            made = folded(leaf, leaf.tensor.view(), folds)
            scaled += made is not None
            state[leaf.tensor.name] = leaf.tensor.view() if made is None else made
        x = layers.run(layers.layer(index), index, x)
    assert scaled > 2 * len(layers.kinds)
    wanted = oracle_logits(oracle, tokens)
    others = {name: file.view() for name, file in files.items() if name not in state}
    save_file({**others, **state}, tmp_path / "m" / "model.safetensors")
    logits = np.asarray(load_pretrained(tmp_path / "m", dtype="float32")(tokens))
    assert np.abs(logits - wanted).max() < TOLERANCE * wanted.std()


ROTATED = {
    "llama-biases": {"tie_word_embeddings": False},
    "qwen3-moe": {},
    "gpt-oss": {},
    "deepseek-v2": {},
    "granite": {"tie_word_embeddings": False, "hidden_size": 48, "head_dim": 12},
}


@pytest.mark.parametrize("name", ROTATED)
def test_rotations_leave_the_float_model_as_it_is(name: str, tmp_path: Path) -> None:
    config = build(name)[0]
    for key, value in ROTATED[name].items():
        setattr(config, key, value)
    oracle = make_oracle(config)
    oracle.save_pretrained(tmp_path / "m")
    stored = open_pretrained(tmp_path / "m", dtype="float32")
    files, scheme = find_tensors(tmp_path / "m"), replace(scheme_named("w4a4"), group=None)
    leaves = assign(find_leaves(stored, files), scheme, [], stored.model.config)
    rotations = find_rotations(stored.model.config, leaves, seed=3)
    state = {}
    for leaf in leaves:
        made = rotations.rotated(leaf, leaf.tensor.view())
        if made is not None:
            state[leaf.tensor.name] = np.ascontiguousarray(made)
    w = "model.layers.0.self_attn.o_proj.weight"
    assert np.abs(state[w] - files[w].view()).max() > 0.1
    tokens = np.random.default_rng(0).integers(3, 97, (2, 24), dtype=np.int32)
    wanted = oracle_logits(oracle, tokens)
    others = {name: file.view() for name, file in files.items() if name not in state}
    (tmp_path / "rotated").mkdir()
    save_file({**others, **state}, tmp_path / "rotated/model.safetensors", {"format": "pt"})
    (tmp_path / "rotated/config.json").write_text((tmp_path / "m/config.json").read_text())
    rotated = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "rotated", attn_implementation="eager", experts_implementation="eager"
    )
    logits = oracle_logits(rotated.eval(), tokens)
    assert np.abs(logits - wanted).max() < TOLERANCE * wanted.std()


def test_scales_in_bfloat16(tmp_path: Path) -> None:
    check(CASES["llama"], tmp_path, torch.bfloat16, scheme="w4a16")


def test_several_schemes(tmp_path: Path) -> None:
    """Which transformers does not dequantize when it loads, but in the first forward pass."""
    rules = ["layers/0/mlp/down=keep", "layers/1/=w8a16", "lm_head=w8a16"]
    more = {"scheme": "w4a16", "rules": rules}
    how = transformers.CompressedTensorsConfig(dequantize=False)
    check(CASES["llama"], tmp_path, torch.float32, how, **more)


PRESETS = {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "fp8": "FP8_DYNAMIC", "w8a8": "W8A8"}
"""Schemes of compressed-tensors whose inputs are rounded as those of ours."""


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_codes_of_four_bit_floats_are_those_of_compressed_tensors(name: str) -> None:
    """Given the same scales; and where none is tried but that of the range (and of powers of two
    the better of two), the scales."""
    w = np.random.default_rng(0).standard_t(4, (96, 256)).astype(np.float32)
    scheme = replace(scheme_named(name), clip=False)
    args = preset_name_to_scheme(PRESETS[name], ["Linear"]).weights
    assert isinstance(args, QuantizationArgs)
    groups = torch.from_numpy(w).unflatten(1, (-1, args.group_size))
    ends = groups.amin(2), groups.amax(2)
    whole = generate_gparam(torch.from_numpy(w).min(), torch.from_numpy(w).max())
    whole = whole if name == "nvfp4" else None
    scales, _ = calculate_qparams(*ends, args, whole)
    codes = round_matrix(w, scheme, np.dtype(np.float32))
    if name == "nvfp4":
        np.testing.assert_array_equal(codes.grid.scales_PG.astype(np.float32), scales.numpy())
        assert codes.grid.divisor == whole.numpy()[0]
    for given in (codes, round_matrix(w, scheme_named(name), np.dtype(np.float32))):
        scales = torch.from_numpy(given.grid.scales_PG.astype(np.float32))
        packed = quantize_and_pack_fp4(
            torch.from_numpy(w), scales, global_scale=whole, group_size=args.group_size
        )
        np.testing.assert_array_equal(packed.numpy(), pack_pairs(given.values_OI))


@pytest.mark.parametrize("name", PRESETS)
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(name: str) -> None:
    """But for the scale of integers, which vLLM makes for codes to 127 and this library to 127.5.
    XLA divides by a broadcast number by multiplying, so that products differ in the last bit."""
    x = np.random.default_rng(1).standard_t(3, (40, 256)).astype(np.float32)
    args = preset_name_to_scheme(PRESETS[name], ["Linear"]).input_activations
    given = torch.from_numpy(x)[None]
    whole = generate_gparam(given.min(), given.max()) if name == "nvfp4" else None
    scale, zero = compute_dynamic_scales_and_zp(given, args, torch.nn.Identity(), whole)
    if name == "w8a8":
        scale = scale * 127.5 / 127
    wanted = fake_quantize(given, scale, zero, args, whole)[0].numpy()
    divisor = None if whole is None else whole.numpy()
    found = RoundedInputs(rule=scheme_named(name).inputs, divisor_E=divisor)(x)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=3e-7)
