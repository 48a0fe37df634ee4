"""Whatever a quantized file or its config holds: it is read, or refused in one paragraph."""

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.models.quantized_files import CASES, write_file

from fornax.checkpoint.safetensors_file import DTYPES, open_file
from fornax.config.errors import FornaxError
from fornax.models.families.quantized import DequantizedTensor, read_quantization

_JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.sampled_from([2**31, 2**63, 10**30, 0.5, float("inf")])
    | st.text(string.printable, max_size=4)
    | st.sampled_from(["group", "channel", "tensor", "block", "int", "float", "re:(", "re:.*"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)
_SHAPES = st.lists(st.integers(0, 70), max_size=2) | st.lists(
    st.integers(0, 5) | st.just(16), min_size=3, max_size=4
)
_PARTS = ["weight", "weight_scale", "weight_zero_point", "weight_g_idx", "g_idx", "scales"]
_DTYPES = [np.float32, np.float16, np.int8, np.uint8, np.int32, np.int64]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A format's config and tensors, some of them changed."""
    case = CASES[draw(st.sampled_from(sorted(CASES)))]
    config, tensors = dict(case.config), dict(case.tensors)
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(
            st.sampled_from(["config", "weights", "drop", "dtype", "shape", "bytes", "add"])
        )
        name = draw(st.sampled_from(sorted(tensors))) if tensors else ""
        if kind == "config":
            config[draw(st.sampled_from(sorted(config)))] = draw(_JUNK)
        elif kind == "weights" and isinstance(groups := config.get("config_groups"), dict):
            group = groups.get("group_0")
            if isinstance(group, dict) and isinstance(group["weights"], dict):
                key = draw(st.sampled_from(sorted(group["weights"])))
                weights = {**group["weights"], key: draw(_JUNK)}
                config["config_groups"] = {"group_0": {**group, "weights": weights}}
        elif kind == "add":
            tensors[f"x.{draw(st.sampled_from(_PARTS))}"] = np.zeros(
                draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(_DTYPES))
            )
        elif name and kind == "drop":
            del tensors[name]
        elif name and kind == "dtype":
            tensors[name] = np.zeros(tensors[name].shape, draw(st.sampled_from(_DTYPES)))
        elif name and kind == "shape":
            shape = draw(_SHAPES)
            tensors[name] = np.resize(tensors[name], shape)
        elif name:
            raw = np.frombuffer(draw(st.binary(min_size=1, max_size=8)), np.uint8)
            size = tensors[name].nbytes
            data = np.resize(raw, size).tobytes()
            tensors[name] = np.frombuffer(data, tensors[name].dtype).reshape(tensors[name].shape)
    return config, tensors


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(damaged())
@example(({"quant_method": ["fp8"]}, {}))
@example(({"quant_method": "modelopt", "quant_algo": []}, {}))
def test_no_file_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory,
    given: tuple[dict[str, Any], dict[str, np.ndarray]],
) -> None:
    config, tensors = given
    file: Path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_file(file, tensors)
    refusal = ""
    try:
        found = read_quantization({"quantization_config": config})
        assert found is not None
        for tensor in found.dequantize(open_file(file, DTYPES)).values():
            values = tensor.view()
            assert values.shape == tensor.shape
            if isinstance(tensor, DequantizedTensor):
                assert values.dtype == tensor.computed
    except FornaxError as error:
        refusal = str(error)
    assert "\n" not in refusal
