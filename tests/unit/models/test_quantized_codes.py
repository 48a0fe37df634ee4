"""Codes of quantized files as packed products take them, beside the numbers they stand for."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.models.quantized_files import CASES
from tests.unit.models.test_quantized import dequantized

from fornax import kernels
from fornax.config.errors import CheckpointError
from fornax.models.families import StoredCodes
from fornax.models.families.quantized import DequantizedTensor
from fornax.models.families.quantized.codes import sort_inputs

FORMATS = {
    "awq-groups-32": "int4 by 32 inputs",
    "awq-one-group": "int4 by 128 inputs",
    "float-channel": "fp8",
    "float-tensor": "fp8",
    "fp8-blocks-256": "fp8 by 128 inputs",
    "fp8-blocks-32": "fp8 by 32 inputs",
    "fp8-tensor": "fp8",
    "fp8-wider-blocks": "fp8",
    "gptq-2": "int4 by 32 inputs",
    "gptq-3": "int4 by 32 inputs",
    "gptq-4": "int4 by 32 inputs",
    "gptq-8-middle": "int8 by 32 inputs",
    "int-channel": "int8 by 128 inputs",
    "int-tensor": "int8 by 128 inputs",
    "mxfp4-packed": "mxfp4 by 32 inputs",
    "pack-4-groups-256": "int4 by 128 inputs",
    "pack-4-groups-32": "int4 by 32 inputs",
    "pack-4-groups-order": "int4 by 32 inputs in activation order",
    "pack-4-groups-64": "int4 by 64 inputs",
    "pack-5": "int8 by 32 inputs",
    "pack-7": "int8 by 128 inputs",
    "pack-8-groups-128": "int8 by 128 inputs",
}
REASONS = {
    "awq": "groups of 4 inputs are not a multiple of 32",
    "float-block": "groups of 5",
    "fp8-blocks": "groups of 3",
    "fp8-blocks-bfloat16": "groups of 3",
    "fp8-blocks-e8m0": "groups of 3",
    "gptq-4-order": "groups of 16",
    "gptq-4-v2": "groups of 16",
    "gptq-8": "zero points other than 128",
    "int-zeros": "zero points other than 128",
    "modelopt-nvfp4": "no product takes codes",
    "nf4": "no product takes codes",
    "nf4-nested": "no product takes codes",
    "nf4-odd": "no product takes codes",
    "nvfp4": "no product takes codes",
    "pack-3": "groups of 6",
    "pack-4": "groups of 4",
    "pack-4-old-zeros": "groups of 4",
    "pack-4-order": "groups of 4",
    "pack-4-zeros": "groups of 4",
    "pack-8": "zero points other than 128",
}


def stored(name: str, folder: Path) -> DequantizedTensor:
    (tensor,) = dequantized(CASES[name], folder).values()
    assert isinstance(tensor, DequantizedTensor)
    return tensor


def test_every_case_is_packed_or_told_why_not() -> None:
    assert FORMATS.keys() | REASONS.keys() | {"mxfp4-experts"} == CASES.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_packed_codes_stand_for_the_files_values(name: str, tmp_path: Path) -> None:
    """A code times its scale, exact in float32; what a library rounds further, rounded likewise."""
    case, codes = CASES[name], stored(name, tmp_path).codes()
    assert isinstance(codes, StoredCodes)
    assert str(codes.format) == FORMATS[name]
    values, scales, zeros, order = codes.read()
    packed = kernels.pack_codes(
        jnp.asarray(values.T)[None],
        jnp.asarray(scales.T)[None],
        None if zeros is None else jnp.asarray(zeros.T)[None],
        precision=codes.format.precision,
        group=codes.format.group,
        order=None if order is None else jnp.asarray(order)[None],
        inputs=(case.weight.shape[1],),
        outputs=(case.weight.shape[0],),
        dtype=jnp.float32,
        implementation="plain",
    )
    exact = np.asarray(packed.unpack()).T
    np.testing.assert_array_equal(exact.astype(case.computed).astype(np.float64), case.weight)
    spacing = {np.float16: 2**-11, np.float32: 0.0}.get(case.computed, 2**-8)
    assert (np.abs(exact - case.weight) <= spacing * np.abs(case.weight)).all()


def test_codes_of_a_tensor_of_all_experts_stand_for_its_values(tmp_path: Path) -> None:
    case, codes = CASES["mxfp4-experts"], stored("mxfp4-experts", tmp_path).codes()
    assert isinstance(codes, StoredCodes)
    assert str(codes.format) == "mxfp4 by 32 inputs"
    read = [codes.read(expert) for expert in range(2)]
    packed = kernels.pack_codes(
        jnp.stack([jnp.asarray(each.values.T) for each in read]),
        jnp.stack([jnp.asarray(each.scales.T) for each in read]),
        precision="mxfp4",
        group=32,
        inputs=(64,),
        outputs=(3,),
        dtype=jnp.float32,
        experts=2,
        implementation="plain",
    )
    exact = np.where(np.asarray(packed.scales).repeat(32, axis=2)[0] == 0, 0, case.weight)
    np.testing.assert_array_equal(packed.unpack(), exact)  # 2^-127, a denormal, counts as 0


def test_an_activation_order_of_groups_that_differ_in_size_is_told() -> None:
    groups = np.array([0, 0, 1, 1, 1, 0] * 32)
    assert sort_inputs(np.repeat([0, 1], 32), 32) is None
    assert "differ in size" in str(sort_inputs(groups[:-1] % 2, 96))
    order = sort_inputs(groups, 96)
    assert isinstance(order, np.ndarray)
    np.testing.assert_array_equal(groups[order], np.repeat([0, 1], 96))


@pytest.mark.parametrize("name", REASONS)
def test_other_codes_say_why_they_are_dequantized(name: str, tmp_path: Path) -> None:
    reason = stored(name, tmp_path).codes()
    assert isinstance(reason, str)
    assert REASONS[name] in reason


@pytest.mark.parametrize(
    ("name", "part", "value"),
    [
        ("awq-groups-32", "scales", np.inf),
        ("fp8-blocks-32", "weight_scale_inv", np.nan),
        ("gptq-4", "scales", np.nan),
        ("mxfp4-packed", "weight_scale", 255),
        ("pack-4-groups-32", "weight_scale", np.nan),
    ],
)
def test_scales_that_are_no_numbers_are_refused_when_read(
    name: str, part: str, value: float, tmp_path: Path
) -> None:
    case = CASES[name]
    changed = np.array(case.tensors[f"x.{part}"])
    changed.flat[-1] = value
    tensors = {**case.tensors, f"x.{part}": changed}
    (tensor,) = dequantized(case._replace(tensors=tensors), tmp_path).values()
    assert isinstance(tensor, DequantizedTensor)
    codes = tensor.codes()
    assert isinstance(codes, StoredCodes)
    with pytest.raises(CheckpointError, match=rf"x\.{part} holds scales"):
        codes.read()
