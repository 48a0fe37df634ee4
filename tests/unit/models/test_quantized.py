"""Quantized files: what each format's tensors stand for, and how a directory of them is loaded."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.unit.models.quantized_files import CASES, Case, write_file

from fornax.checkpoint.safetensors_file import DTYPES, open_file
from fornax.config.errors import CheckpointError
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    create_decoder,
    formats_table,
    load_pretrained,
    open_pretrained,
    save_pretrained,
    stored_dtypes,
)
from fornax.models.families.quantized import FORMATS, DequantizedTensor, Tensor, read_quantization


def dequantized(case: Case, folder: Path, **keys: Any) -> dict[str, Tensor]:
    write_file(folder / "x.safetensors", case.tensors)
    found = read_quantization({"quantization_config": {**case.config, **keys}})
    assert found is not None
    return found.dequantize(open_file(folder / "x.safetensors", DTYPES))


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_what_its_codes_and_scales_stand_for(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tensor,) = dequantized(case, tmp_path).values()
    values = tensor.view()
    assert values.dtype == case.computed
    assert tensor.shape == values.shape == case.weight.shape
    np.testing.assert_array_equal(values.astype(np.float64), case.weight)


@given(st.data())
def test_rows_are_the_same_whichever_are_asked_for(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    (tensor,) = dequantized(case, tmp_path_factory.getbasetemp()).values()
    assert isinstance(tensor, DequantizedTensor)
    whole = tensor.view().swapaxes(-1, -2) if tensor.transposed else tensor.view()
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    np.testing.assert_array_equal(tensor.rows(start, stop), whole[start:stop])


def test_every_format_has_a_case_and_a_row() -> None:
    assert {case.config["quant_method"] for case in CASES.values()} == {f.method for f in FORMATS}
    assert [row[0] for row in formats_table()] == [f"`{form.method}`" for form in FORMATS]


def test_the_dtype_is_the_models_or_that_of_scales(tmp_path: Path) -> None:
    write_file(tmp_path / "x", CASES["pack-4-zeros"].tensors)
    stored = open_file(tmp_path / "x", DTYPES)
    for keys, wanted in (
        ({}, np.float16),
        ({"torch_dtype": "bfloat16"}, jnp.bfloat16),
        ({"text_config": {"dtype": "float32"}}, np.float32),
    ):
        found = read_quantization({"quantization_config": CASES["pack-4-zeros"].config, **keys})
        assert found is not None
        assert found.dequantize(stored)["x.weight"].dtype == wanted


# A whole model, quantized here to bytes that a float can hold.

CONFIG = DecoderConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.5,
    mlp_pattern=("mlp", "experts", "experts"),
    experts=ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=8),
    qk_norm="head",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized directory, and a float one of the same weights in float32."""
    folder = tmp_path_factory.mktemp("quantized")
    save_pretrained(create_decoder(CONFIG, seed=1), folder / "floats")
    (folder / "codes").mkdir()
    tensors = load_file(folder / "floats" / "model.safetensors")
    stored, floats = {}, {}
    for name, tensor in tensors.items():
        floats[name] = tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
        stored[name] = floats[name].astype(ml_dtypes.bfloat16)
        if "_proj" not in name:
            continue
        codes = (tensor / 0.07).astype(ml_dtypes.float8_e4m3fn)
        counts = (-(-tensor.shape[0] // 6), -(-tensor.shape[1] // 5))
        scales = np.random.default_rng(0).uniform(0.05, 0.09, counts).astype(np.float32)
        stored[name], stored[f"{name}_scale_inv"] = codes, scales
        each = np.repeat(np.repeat(scales, 6, 0), 5, 1)[: tensor.shape[0], : tensor.shape[1]]
        floats[name] = codes.astype(np.float32) * each
    write_file(folder / "codes" / "model.safetensors", stored)
    write_file(folder / "floats" / "model.safetensors", floats)
    values = json.loads((folder / "floats" / "config.json").read_text())
    (folder / "floats" / "config.json").write_text(json.dumps(values))
    values |= {"torch_dtype": "bfloat16"}
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [6, 5]}
    (folder / "codes" / "config.json").write_text(json.dumps(values))
    return folder / "codes", folder / "floats"


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(
        jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(wanted)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [None, {"fsdp": 8}, {"data": 2, "expert": 2, "tensor": 2}], ids=str
)
def test_a_directory_loads_as_its_floats_do(
    saved: tuple[Path, Path], sizes: dict[str, int] | None
) -> None:
    codes, floats = saved
    mesh = None if sizes is None else make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))
    assert_same(load_pretrained(codes, "float32", mesh), load_pretrained(floats))
    half = load_pretrained(codes, mesh=mesh)
    assert half.embed.embedding.dtype == jnp.bfloat16
    assert_same(half, load_pretrained(floats, "bfloat16"))
    assert stored_dtypes(codes) == {"bfloat16"}


@pytest.mark.slow
def test_what_is_saved_again_is_floats(saved: tuple[Path, Path], tmp_path: Path) -> None:
    save_pretrained(load_pretrained(saved[0]), tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    assert_same(load_pretrained(tmp_path / "again"), load_pretrained(saved[0]))


@pytest.mark.slow
def test_a_scheme_of_caches_is_named(
    saved: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = json.loads((saved[0] / "config.json").read_text())
    values["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(saved[0] / "model.safetensors")
    with caplog.at_level(logging.WARNING, "fornax.models"):
        open_pretrained(tmp_path)
    assert "kv_cache_scheme of quantization_config is not used" in caplog.text


# What is refused


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("fp8-blocks", "weight", None, r"x\.weight_scale_inv is there and x\.weight is not"),
        ("fp8-blocks", "weight_scale_inv", None, r"x\.weight \(float8_e4m3fn\): no numbers"),
        ("fp8-blocks", "weight_scale_inv", np.ones((3, 2), np.float32), r"\[3, 2\], and \[3, 3\]"),
        ("fp8-tensor", "weight_scale_inv", np.ones(5, np.float32), "without weight_block_size"),
        ("pack-4", "weight_packed", np.ones((5, 3), np.int32), "not hold the 5 x 12 numbers"),
        ("pack-4", "weight_shape", np.array([5, 13]), r"group.* 4, which do not divide 13|13"),
        ("pack-4", "weight_scale", np.ones((5, 2), np.float16), r"\[5, 2\], and \[5, 3\]"),
        ("pack-4-zeros", "weight_zero_point", None, r"weight_zero_point is not"),
        ("int-channel", "weight_g_idx", np.zeros(12, np.int32), "strategy=channel has no groups"),
        ("float-channel", "weight_zero_point", np.ones((5, 1), np.int8), "floats have none"),
        ("nvfp4", "weight_global_scale", None, "weight_global_scale is not"),
        ("mxfp4-experts", "weight_scales", None, r"x\.weight_scales is not"),
        ("mxfp4-experts", "weight_blocks", None, r"x\.weight_blocks is not"),
        ("awq", "qzeros", np.ones((2, 3), np.int32), r"qzeros has shape \[2, 3\]"),
        ("gptq-4", "g_idx", np.zeros(63, np.int32), r"g_idx has shape \[63\]"),
        ("gptq-3", "qweight", np.zeros((7, 32), np.int32), "no whole runs of 32"),
        ("nf4", "weight.absmax", np.ones(9, np.float32), r"absmax has shape \[9\], and \[8\]"),
        ("nf4", "weight", np.zeros((4, 1), np.uint8), "holds 4 bytes"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused_before_they_are_read(
    name: str, part: str, value: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    tensors = {key: x for key, x in case.tensors.items() if key != f"x.{part}"}
    if value is not None:
        tensors[f"x.{part}"] = value
    with pytest.raises(CheckpointError, match=message):
        dequantized(case._replace(tensors=tensors), tmp_path)


def _with(values: np.ndarray, value: float) -> np.ndarray:
    changed = np.array(values)
    changed.flat[-1] = value
    return changed


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("fp8-blocks", "weight_scale_inv", np.nan, "scales that are infinite or no numbers"),
        ("fp8-tensor", "weight_scale_inv", np.inf, "infinite"),
        ("fp8-blocks-e8m0", "weight_scale_inv", np.nan, "no numbers"),
        ("pack-4", "weight_scale", np.nan, "no numbers"),
        ("pack-4-old-zeros", "weight_zero_point", 8, "zero points outside -8 to 7"),
        ("pack-4-order", "weight_g_idx", 3, "groups beyond the 3 that have scales"),
        ("nvfp4", "weight_global_scale", 0, "is 0, and scales are divided by it"),
        ("mxfp4-packed", "weight_scale", 255, "scales of 255"),
        ("mxfp4-experts", "weight_scales", 255, "scales of 255"),
        ("awq", "scales", np.inf, "infinite"),
        ("gptq-4-order", "g_idx", 4, "groups outside 0 to 3"),
        ("gptq-4-order", "g_idx", -1, "groups outside 0 to 3"),
        ("nf4", "weight.absmax", np.nan, "no numbers"),
        ("nf4-nested", "weight.nested_absmax", np.inf, "infinite"),
        ("modelopt-nvfp4", "weight_scale_2", np.nan, "no numbers"),
    ],
)
def test_numbers_that_stand_for_nothing_are_refused_when_read(
    name: str, part: str, value: float, message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    changed = _with(case.tensors[f"x.{part}"], value)
    found = dequantized(case._replace(tensors={**case.tensors, f"x.{part}": changed}), tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"x\.{part}.*{message}".replace("weight.", r"weight\.")
    ):
        found["x.weight"].view()


def test_a_config_that_no_tensor_bears_out_is_refused(tmp_path: Path) -> None:
    floats = CASES["fp8-blocks"]._replace(tensors={"x.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"no tensor is; remove it from config\.json"):
        dequantized(floats, tmp_path)


@pytest.mark.slow
def test_biases_of_zeros_that_no_module_has_are_left_out(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(saved[1] / "model.safetensors")
    (tmp_path / "config.json").write_text((saved[1] / "config.json").read_text())
    name = "model.layers.0.self_attn.q_proj.bias"
    write_file(tmp_path / "model.safetensors", {**tensors, name: np.zeros(16, np.float32)})
    assert_same(load_pretrained(tmp_path), load_pretrained(saved[1]))
    write_file(tmp_path / "model.safetensors", {**tensors, name: np.ones(16, np.float32)})
    with pytest.raises(CheckpointError, match=f"unexpected {name}"):
        load_pretrained(tmp_path)
