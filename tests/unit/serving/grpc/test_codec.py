"""Tensors of every dtype through messages, and messages that lie about them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.grpc.client import infer_message, outputs_of
from fornax.serving.grpc.codec import decode, encode
from fornax.serving.grpc.methods import METHODS
from fornax.serving.types import InferResult
from fornax.serving.v2.datatypes import DTYPES
from fornax.serving.v2.shared_memory import SharedMemory

_LIMITS = Limits(max_tensor_bytes=1000, max_tensors=4)
_FIELDS = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, float("inf")]),
    "FP64": ("fp64_contents", [1e-300, -0.0]),
    "BYTES": ("bytes_contents", [b"", b"\xff\0"]),
}


def _decode(request, limits=_LIMITS):
    return decode(request, 100.0, SharedMemory(enabled=False), limits)


def _refused(request, words, code=ServingCode.INVALID_ARGUMENT):
    with pytest.raises(ServingError, match=words) as caught:
        _decode(request)
    assert caught.value.code is code


def _typed(datatype, field, values, shape=None):
    request = METHODS["ModelInfer"].request(model_name="m")
    shape = [len(values)] if shape is None else shape
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return request


@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_tensors_come_and_go_bit_for_bit(datatype):
    if datatype == "BYTES":
        array = np.array([b"", b"\0\xff", "é".encode()], np.object_).reshape(3, 1)
    else:
        size = DTYPES[datatype].itemsize
        raw = bytes([1, 0] * 3 * size) if datatype == "BOOL" else bytes(range(200, 200 + 6 * size))
        array = np.frombuffer(raw[: 6 * size], DTYPES[datatype]).reshape(2, 3)
    request, deliveries = _decode(infer_message("m", {"x": array}))
    got = request.inputs["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    response = METHODS["ModelInfer"].response()
    back = outputs_of(encode(InferResult("m", "1", "", "", {"y": got}), deliveries, response))["y"]
    assert response.outputs[0].datatype == datatype
    assert back.tolist() == array.tolist() if datatype == "BYTES" else back.tobytes() == raw


@pytest.mark.parametrize(("datatype", "field", "values"), [(k, *v) for k, v in _FIELDS.items()])
def test_typed_contents_are_the_array(datatype, field, values):
    got = _decode(_typed(datatype, field, values, [2, 1]))[0].inputs["x"]
    assert got.dtype == DTYPES[datatype]
    assert got.tolist() == [[values[0]], [values[1]]]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_typed_contents(datatype):
    _refused(_typed(datatype, "fp32_contents", [1.0]), "send it raw")


@pytest.mark.parametrize(
    ("datatype", "values"), [("INT8", [128]), ("INT16", [-32769]), ("UINT8", [0, 256])]
)
def test_a_number_outside_its_datatype_is_refused(datatype, values):
    _refused(_typed(datatype, _FIELDS[datatype][0], values), "range is")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (_typed("INT32", "fp32_contents", [1.0]), "goes in int_contents, not in fp32"),
        (_typed("INT32", "int_contents", [1, 2], [3]), "2 elements where shape"),
        (_typed("INT32", "int_contents", [], [2**40, 2**40]), "elements"),
        (_typed("INT32", "int_contents", [1], [-1]), "integers from 0"),
        (_typed("QUX", "int_contents", [1]), "not of the V2 protocol"),
        (_typed("INT32", "int_contents", [1], [1] * 50), "50 dimensions"),
    ],
)
def test_contents_that_do_not_fit_are_refused(request_, words):
    _refused(request_, words)


def _raw(**changes):
    """A request with inputs x and y of one byte each, with changes."""
    request = infer_message("m", {"x": np.zeros(1, np.int8), "y": np.ones(1, np.int8)})
    if "raw" in changes:
        del request.raw_input_contents[:]
        request.raw_input_contents.extend(changes["raw"])
    if "contents" in changes:
        request.inputs[1].contents.int_contents.append(1)
    if "name" in changes:
        request.inputs[1].name = changes["name"]
    for key, value in changes.get("parameters", {}).items():
        setattr(request.parameters[key], *value)
    for key, value in changes.get("tensor", {}).items():
        setattr(request.inputs[0].parameters[key], *value)
    for key, value in changes.get("output", {}).items():
        output = request.outputs[0] if request.outputs else request.outputs.add(name="o")
        setattr(output.parameters[key], *value)
    return request


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"raw": [b"\0"]}, "'y' has no entry in raw_input_contents, which has 1"),
        ({"raw": [b"\0"] * 3}, "has 3 entries where 2 inputs"),
        ({"raw": [b"\0", b"\0\0"]}, "2 bytes were sent where INT8"),
        ({"contents": 1}, "send its data once"),
        ({"name": "x"}, "'x' was sent twice"),
        ({"parameters": {"priority": ("string_param", "1")}}, "priority"),
        ({"parameters": {"timeout": ("int64_param", -1)}}, "timeout"),
        ({"parameters": {"function": ("bool_param", True)}}, "function"),
        ({"tensor": {"classification": ("int64_param", 1)}}, "'classification' has no meaning"),
        ({"tensor": {"shared_memory_region": ("string_param", "r")}}, "byte_size"),
        ({"output": {"classification": ("int64_param", -1)}}, "classification=-1"),
        ({"output": {"binary": ("bool_param", True)}}, "'binary' has no meaning"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(changes, words):
    _refused(_raw(**changes), words)


def test_limits_are_kept():
    _refused(
        infer_message("m", {"x": np.zeros(1001, np.int8)}), "1001 bytes", ServingCode.TOO_LARGE
    )
    typed = _typed("INT64", "int64_contents", [0] * 126)
    _refused(typed, "1008 bytes", ServingCode.TOO_LARGE)
    _refused(infer_message("m", {str(i): np.zeros(1) for i in range(5)}), "5 inputs; at most 4")
    _refused(infer_message("m", {}, outputs=list("abcde")), "5 outputs; at most 4")


def test_parameters_reach_the_request():
    parameters = {
        "priority": 1,
        "timeout": 2_000_000,
        "temperature": 0.5,
        "stop": "x",
        "flag": True,
    }
    sent = infer_message("m:score", {}, outputs=("a",), version="3", id="i", parameters=parameters)
    request, _ = _decode(sent)
    assert (request.model, request.function, request.version) == ("m", "score", "3")
    assert (request.id, request.outputs, request.priority) == ("i", ("a",), 1)
    assert request.deadline == pytest.approx(102)
    assert request.parameters == {"temperature": 0.5, "stop": "x", "flag": True}
    with pytest.raises(ServingError, match="leave one out"):
        _decode(infer_message("m:score", {}, parameters={"function": "other"}))
    with pytest.raises(ServingError) as caught:
        _decode(infer_message("m", {}, parameters={"sequence_id": 7}))
    assert caught.value.code is ServingCode.UNIMPLEMENTED


@pytest.mark.parametrize("field", ["id", "model_name", "model_version"])
def test_a_name_that_the_log_would_repeat_at_length_is_refused(field):
    request = infer_message("m", {})
    setattr(request, field, "x" * 1025)
    _refused(request, "longer than 1024")


def test_classes_are_the_largest_elements():
    request = infer_message("m", {}, outputs=("p",))
    request.outputs[0].parameters["classification"].int64_param = 2
    _, deliveries = _decode(request)
    result = InferResult("m", "1", "", "", {"p": np.array([[0.5, 2.0, 1.0]], np.float32)})
    response = encode(result, deliveries, METHODS["ModelInfer"].response())
    assert outputs_of(response)["p"].tolist() == [[b"2.000000:1", b"1.000000:2"]]


def test_the_client_sends_strings_and_foreign_byte_orders():
    sent = infer_message("m", {"s": np.array(["a", "é"]), "n": np.arange(3, dtype=">i4")})
    request, _ = _decode(sent)
    assert request.inputs["s"].tolist() == [b"a", "é".encode()]
    assert request.inputs["n"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="complex"):
        infer_message("m", {"x": np.zeros(1, np.complex64)})


_small = st.integers(-2, 5)
_parameter = st.sampled_from(
    [
        ("bool_param", True),
        ("int64_param", -1),
        ("int64_param", 3),
        ("string_param", "r"),
        ("double_param", float("nan")),
        ("uint64_param", 2**64 - 1),
        None,
    ]
)
_names = st.sampled_from(
    [
        "priority",
        "timeout",
        "function",
        "sequence_id",
        "classification",
        "shared_memory_region",
        "shared_memory_byte_size",
        "shared_memory_offset",
        "triton_enable_empty_final_response",
    ]
)
_parameters = st.dictionaries(_names, _parameter, max_size=3)


def _set(parameters, values):
    for key, value in values.items():
        parameters[key].SetInParent()
        if value is not None:
            setattr(parameters[key], *value)


@st.composite
def _requests(draw):
    request = METHODS["ModelInfer"].request(model_name=draw(st.text(max_size=3)))
    _set(request.parameters, draw(_parameters))
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(
            name=draw(st.sampled_from(["x", "y", ""])),
            datatype=draw(st.sampled_from([*DTYPES, "", "int32"])),
            shape=draw(st.lists(st.one_of(_small, st.just(2**62)), max_size=3)),
        )
        _set(tensor.parameters, draw(_parameters))
        if draw(st.booleans()):
            field, values = draw(st.sampled_from(list(_FIELDS.values())))
            getattr(tensor.contents, field).extend(values * draw(st.integers(0, 3)))
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=40), max_size=4)))
    for name in draw(st.lists(st.sampled_from(["x", "o"]), max_size=2)):
        _set(request.outputs.add(name=name).parameters, draw(_parameters))
    return request


@settings(max_examples=150)
@given(_requests())
def test_any_combination_of_fields_is_read_or_refused(request_):
    try:
        request, _ = _decode(type(request_).FromString(request_.SerializeToString()))
    except ServingError as error:
        refused = error.code
    else:
        refused = None
        for tensor in request_.inputs:
            array = request.inputs[tensor.name]
            assert array.dtype == DTYPES[tensor.datatype]
            assert array.shape == tuple(tensor.shape)
    assert refused is not ServingCode.INTERNAL
