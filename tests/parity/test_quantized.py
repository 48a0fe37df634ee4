"""Quantized directories: weights bit for bit as their own libraries dequantize them, and logits."""

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import jax
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from flax import nnx
from safetensors.torch import load_file, save_file
from tests.memory import let_programs_go
from tests.parity.conftest import make_oracle, oracle_logits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fornax.models import Decoder, load_pretrained

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4
State = dict[str, torch.Tensor]

LLAMA = transformers.LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(autouse=True)
def small_process() -> Iterator[None]:
    """Each case compiles its own programs."""
    yield
    let_programs_go()


def directory(
    config: transformers.PreTrainedConfig, folder: Path, dtype: torch.dtype
) -> tuple[Path, State, list[str]]:
    """A float directory, its tensors, and the names of its quantizable matrices."""
    make_oracle(config).to(dtype).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    linear = [
        name
        for name, tensor in state.items()
        if tensor.ndim == 2
        and "embed" not in name
        and "lm_head" not in name
        and "gate." not in name
    ]
    return folder, state, linear


def rewrite(folder: Path, state: State, quantization: Mapping[str, Any] | None) -> None:
    """Replace a directory's tensors, and say how they are quantized."""
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    if quantization is not None:
        values["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(values))


def assert_same(found: Decoder, wanted: Decoder) -> None:
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(nnx.state(found)), nnx.to_flat_state(nnx.state(wanted)), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(a.get_value()), np.asarray(b.get_value()), err_msg=str(path)
        )


def check_weights(folder: Path, floats: State, tmp_path: Path) -> Decoder:
    """The directory loads as one of the library's float tensors does; returns it in float32."""
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    rewrite(plain, {name: tensor.float() for name, tensor in floats.items()}, None)
    found = load_pretrained(folder, dtype="float32")
    assert_same(found, load_pretrained(plain))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, state: nnx.State, tokens: np.ndarray) -> jax.Array:
    return nnx.merge(graphdef, state)(tokens)


def check_logits(model: Decoder, folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its options are merged with those in config.json
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **options
        )
    tokens = np.random.default_rng(0).integers(3, 97, (2, 24), dtype=np.int32)
    if getattr(theirs, "is_loaded_in_4bit", False):
        theirs = theirs.dequantize()  # its products of codes are of rounded activations
    for parameter in theirs.parameters():
        parameter.data = parameter.data.float()  # some loaders leave norms in the file's dtype
    wanted = oracle_logits(theirs.eval(), tokens)
    assert wanted.std() > 0.3, "logits too small for the tolerance to mean anything"
    assert np.abs(np.asarray(_logits(*nnx.split(model), tokens)) - wanted).max() < TOLERANCE


# compressed-tensors


def _scheme(layout: str, **weights: Any) -> QuantizationScheme:
    args = QuantizationArgs(**weights)
    return QuantizationScheme(targets=["Linear"], weights=args, format=layout)


def _int(bits: int, layout: str = "pack-quantized", **more: Any) -> QuantizationScheme:
    return _scheme(layout, num_bits=bits, type="int", **more)


def _float(layout: str = "float-quantized", bits: int = 8, **more: Any) -> QuantizationScheme:
    return _scheme(layout, num_bits=bits, type="float", **more)


CHANNEL, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
SCHEMES = {
    "w4a16": _int(4, strategy="group", group_size=32),
    "w4a16-asymmetric": _int(4, strategy="group", group_size=32, symmetric=False),
    "w4a16-channel": _int(4, strategy="channel", symmetric=False),
    "w3a16": _int(3, strategy="group", group_size=32, symmetric=False),
    "w5a16": _int(5, strategy="channel"),
    "w8a16": _int(8, strategy="group", group_size=16, symmetric=False),
    "w8a8": _int(8, "int-quantized", **CHANNEL),
    "w8a8-asymmetric": _int(8, "int-quantized", **CHANNEL, symmetric=False),
    "w8a8-tensor": _int(8, "int-quantized", **TENSOR),
    "fp8": _float(**TENSOR),
    "fp8-channel": _float(**CHANNEL),
    "fp8-block": _float(strategy="block", block_structure=[48, 40]),
    "nvfp4": _float("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
    "mxfp4": _float("mxfp4-pack-quantized", 4, strategy="group", group_size=32),
}


def _parameters(weight: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> State:
    """Scales and zero points from the extremes of each block."""
    rows, columns = weight.shape
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.reshape(padded.shape[0] // height, height, -1, width)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        width = args.group_size or columns
        groups = weight.reshape(rows, -1, width)
        low, high = groups.amin(-1), groups.amax(-1)
        if args.strategy == "tensor":
            low, high = low.amin().reshape(1), high.amax().reshape(1)
    more = {}
    if args.strategy == "tensor_group":
        more["global_scale"] = (448 * 6 / weight.abs().max()).float().reshape(1)
    scale, zero = calculate_qparams(low.float(), high.float(), args, **more)
    found = {"weight_scale": scale if more else scale.to(dtype), "weight_zero_point": zero}
    return found | {f"weight_{name}": value for name, value in more.items()}


def _compress(
    state: State, linear: list[str], scheme_of: Callable[[str], QuantizationScheme]
) -> tuple[State, State]:
    """The stored tensors, and what the library makes of them."""
    stored, floats = dict(state), dict(state)
    for name in linear:
        scheme, module = scheme_of(name), name.removesuffix("weight")
        compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
        parts = _parameters(state[name], scheme.weights, state[name].dtype)
        parts = compressor.compress({"weight": stored.pop(name), **parts}, scheme)
        stored |= {module + part: tensor for part, tensor in parts.items()}
        floats[name] = compressor.decompress(parts, scheme)["weight"]
    return stored, floats


def _config(*schemes: QuantizationScheme) -> dict[str, Any]:
    groups = {
        f"group_{number}": scheme.model_dump(mode="json", exclude_none=True)
        for number, scheme in enumerate(schemes)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": schemes[0].format if len(schemes) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "version": "0.20.0",
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    dtype = torch.float16 if "asymmetric" in name else torch.bfloat16
    folder, state, linear = directory(LLAMA, tmp_path / "m", dtype)
    stored, floats = _compress(state, linear, lambda _: scheme)
    rewrite(folder, stored, _config(scheme))
    model = check_weights(folder, floats, tmp_path)
    if name in ("w4a16", "w8a8", "fp8-channel", "nvfp4"):
        dequantized = transformers.CompressedTensorsConfig(dequantize=True)
        check_logits(model, folder, quantization_config=dequantized)


def test_compressed_tensors_with_a_scheme_for_each_module(tmp_path: Path) -> None:
    packed = SCHEMES["w4a16"].model_copy(update={"targets": ["re:.*mlp.*"]})
    float8 = SCHEMES["fp8-channel"].model_copy(update={"targets": ["Linear"]})
    folder, state, linear = directory(LLAMA, tmp_path / "m", torch.bfloat16)
    kept = "model.layers.1.self_attn.o_proj"
    linear.remove(f"{kept}.weight")
    stored, floats = _compress(state, linear, lambda name: packed if "mlp" in name else float8)
    config = _config(float8, packed)
    rewrite(folder, stored, {**config, "ignore": ["lm_head", kept]})
    check_weights(folder, floats, tmp_path)


# FP8 by blocks


def _float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // block[0], block[0], columns // block[1], block[1])
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scales


DEEPSEEK = transformers.DeepseekV3Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    kv_lora_rank=64,
    q_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=16,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(LLAMA, torch.float32), (LLAMA, torch.bfloat16), (DEEPSEEK, torch.float32)],
    ids=["llama", "llama-bfloat16-scales", "deepseek_v3"],
)
def test_fp8_by_blocks(config: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, state, linear = directory(config, tmp_path / "m", torch.bfloat16)
    stored = dict(state)
    for name in linear:
        codes, scales = _float8(state[name], (16, 32))
        stored[name], stored[f"{name}_scale_inv"] = codes, scales.to(dtype)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}
    rewrite(folder, stored, {**quantization, "activation_scheme": "dynamic"})
    if config is LLAMA:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = check_weights(folder, theirs.state_dict(), tmp_path)
    else:
        model = load_pretrained(folder, dtype="float32")
    half = load_pretrained(folder)  # the dtype that config.json names: rounded once
    for a, b in zip(
        jax.tree.leaves(nnx.state(half)), jax.tree.leaves(nnx.state(model)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(a.dtype))
    assert half.embed.embedding.dtype == "bfloat16"
    check_logits(model, folder)


# MXFP4 of gpt-oss


def test_mxfp4_experts(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=6,
    )
    folder, state, _ = directory(config, tmp_path / "m", torch.bfloat16)
    stored, floats = dict(state), dict(state)
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8)
        scales[0, 0] = torch.tensor([0, 3])[: scales.shape[2]]  # the least there are
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    rewrite(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model = check_weights(folder, floats, tmp_path)
    check_logits(model, folder, quantization_config=transformers.Mxfp4Config(dequantize=True))


# bitsandbytes


@pytest.mark.parametrize(
    ("kind", "nested", "dtype", "blocks"),
    [
        ("nf4", True, torch.bfloat16, 64),
        ("nf4", False, torch.float16, 32),
        ("fp4", True, torch.float32, 32),
    ],
)
def test_bitsandbytes(
    kind: str, nested: bool, dtype: torch.dtype, blocks: int, tmp_path: Path
) -> None:
    # 0.50.2 dequantizes wrongly on CPU where blocks do not divide rows: here they do.
    folder, state, linear = directory(LLAMA, tmp_path / "m", dtype)
    stored, floats = dict(state), dict(state)
    for name in linear:
        codes, kept = bnb.quantize_4bit(state[name], None, None, blocks, nested, kind)
        stored[name] = codes
        stored |= {f"{name}.{part}": tensor for part, tensor in kept.as_dict(packed=True).items()}
        floats[name] = bnb.dequantize_4bit(codes, kept)
    quantization = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "float32",
        "llm_int8_skip_modules": ["lm_head"],
    }
    rewrite(folder, stored, quantization)
    model = check_weights(folder, floats, tmp_path)
    check_logits(model, folder)


# GPTQ and AWQ, whose libraries are not installed here: packed by compressed-tensors' packer


def _integers(weight: torch.Tensor, bits: int, size: int) -> State:
    """Codes [I, O], zero points and scales [groups, O] of a weight [O, I], asymmetric."""
    groups = weight.float().T.reshape(-1, size, weight.shape[0])
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 2**bits - 1)
    return {"codes": codes.reshape(-1, weight.shape[0]), "zeros": zeros, "scales": scales}


def _packed(codes: torch.Tensor, bits: int, axis: Any) -> torch.Tensor:
    return pack_to_int32((codes - 2 ** (bits - 1)).to(torch.int8), bits, axis)


@pytest.mark.parametrize(("bits", "form"), [(4, "gptq"), (4, "gptq_v2"), (8, "gptq"), (3, "gptq")])
def test_gptq(bits: int, form: str, tmp_path: Path) -> None:
    size = 32
    folder, state, linear = directory(LLAMA, tmp_path / "m", torch.float16)
    stored, floats = dict(state), dict(state)
    for name in linear:
        inputs = state[name].shape[1]
        # Activation order: the group of each input is drawn.
        order = torch.argsort(torch.randperm(inputs) // size, stable=True)
        groups = torch.empty(inputs, dtype=torch.int32)
        groups[order] = torch.arange(inputs, dtype=torch.int32) // size
        found = _integers(stored.pop(name)[:, order], bits, size)
        codes = torch.empty_like(found["codes"])
        codes[order] = found["codes"]
        module = name.removesuffix("weight")
        stored[f"{module}qweight"] = _packed(codes, bits, 0)
        stored[f"{module}qzeros"] = _packed(found["zeros"] - int(form == "gptq"), bits, 1)
        stored[f"{module}scales"], stored[f"{module}g_idx"] = found["scales"], groups
        stored[f"{module}bias"] = torch.zeros(codes.shape[1], dtype=torch.float16)
        differences = (codes - found["zeros"][groups.long()]).half()
        floats[name] = (differences * found["scales"][groups.long()]).T
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": True}
    rewrite(folder, stored, {**quantization, "sym": False, "checkpoint_format": form})
    check_weights(folder, floats, tmp_path)


def test_awq(tmp_path: Path) -> None:
    folder, state, linear = directory(LLAMA, tmp_path / "m", torch.float16)
    stored, floats = dict(state), dict(state)
    for name in linear:
        found, module = _integers(stored.pop(name), 4, 32), name.removesuffix("weight")
        places = torch.arange(state[name].shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
        for part, given in (("qweight", "codes"), ("qzeros", "zeros")):
            stored[module + part] = _packed(found[given][:, places.reshape(-1)], 4, 1)
        stored[f"{module}scales"] = found["scales"]
        zeros = found["zeros"].repeat_interleave(32, 0)
        differences = (found["codes"] - zeros).half()
        floats[name] = (differences * found["scales"].repeat_interleave(32, 0)).T
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    rewrite(folder, stored, {**quantization, "version": "gemm", "modules_to_not_convert": None})
    check_weights(folder, floats, tmp_path)
