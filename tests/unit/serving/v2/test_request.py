"""Requests in JSON and binary: what is read, and what is refused with its reason."""

import dataclasses
import tracemalloc

import numpy as np
import orjson
import pytest

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.types import InferResult
from fornax.serving.v2.request import Decoder
from fornax.serving.v2.response import classify, encode
from fornax.serving.v2.shared_memory import SharedMemory

LIMITS = Limits(max_tensor_bytes=1000, max_tensors=4, request_timeout=10.0)
X = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}


def _binary(name: str, array: np.ndarray, datatype: str) -> dict:
    size = {"binary_data_size": array.nbytes}
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": size}


def _decode(document: object, behind: bytes | None = None, model: str = "m", **options):
    text = document if isinstance(document, bytes) else orjson.dumps(document)
    header = None if behind is None else len(text)
    decoder = Decoder(LIMITS, options.pop("memory", SharedMemory()))
    return decoder.decode(text + (behind or b""), header, model, **options)


def test_binary_json_and_shared_tensors_in_one_request(tmp_path):
    (tmp_path / "object").write_bytes(np.arange(4, dtype="<i8").tobytes())
    memory = SharedMemory(folder=tmp_path)
    memory.register("r", "object", 32)
    a = np.arange(6, dtype=np.int16).reshape(2, 3)
    b = np.array([True, False])
    span = {
        "shared_memory_region": "r",
        "shared_memory_byte_size": 16,
        "shared_memory_offset": 8,
    }
    shared = {"name": "s", "datatype": "INT64", "shape": [2], "parameters": span}
    document = {"inputs": [_binary("a", a, "INT16"), X, shared, _binary("b", b, "BOOL")]}
    request, _ = _decode(document, a.tobytes() + b.tobytes(), memory=memory)
    assert list(request.inputs) == ["a", "x", "s", "b"]
    np.testing.assert_array_equal(request.inputs["a"], a)
    np.testing.assert_array_equal(request.inputs["b"], b)
    assert request.inputs["s"].tolist() == [1, 2]
    assert request.inputs["x"].tolist() == [1, 2]


def test_the_same_text_again_has_its_own_tensors():
    decoder = Decoder(LIMITS, SharedMemory())
    text = orjson.dumps({"inputs": [{**_binary("x", np.zeros(2, "f4"), "FP32")}]})
    for value in (1.0, 2.0):
        array = np.full(2, value, "f4")
        request, wanted = decoder.decode(text + array.tobytes(), len(text), "m", received=value)
        np.testing.assert_array_equal(request.inputs["x"], array)
        assert request.deadline == value + 10.0
        assert not wanted.id
    with pytest.raises(ServingError, match="4 bytes follow the JSON"):
        decoder.decode(text + b"1234", len(text), "m")


def test_texts_with_an_id_parameters_or_spans_are_read_anew(tmp_path):
    (tmp_path / "object").write_bytes(bytes(8))
    memory = SharedMemory(folder=tmp_path)
    span = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    binary = _binary("x", np.zeros(2, "f4"), "FP32")
    document = {"inputs": [binary], "outputs": [{"name": "y", "parameters": span}]}
    decoder = Decoder(LIMITS, memory)
    text = orjson.dumps(document)
    memory.register("r", "object", 8)
    decoder.decode(text + bytes(8), len(text), "m")
    memory.unregister("r")
    with pytest.raises(ServingError, match="r"):
        decoder.decode(text + bytes(8), len(text), "m")
    own = orjson.dumps({"id": "7", "parameters": {"heat": 1}, "inputs": [binary]})
    first, second = (decoder.decode(own + bytes(8), len(own), "m")[0] for _ in range(2))
    assert first.parameters == second.parameters == {"heat": 1}
    assert first.parameters is not second.parameters


def test_inputs_in_shared_memory_are_held_to_the_body_together():
    span = {"shared_memory_region": "r", "shared_memory_byte_size": 1000}
    inputs = [
        {"name": name, "datatype": "UINT8", "shape": [1000], "parameters": span} for name in "abc"
    ]
    limits = dataclasses.replace(LIMITS, max_body_bytes=2000)
    with pytest.raises(ServingError, match="together") as caught:
        Decoder(limits, SharedMemory()).decode(orjson.dumps({"inputs": inputs}), None, "m")
    assert caught.value.code is ServingCode.TOO_LARGE


def test_what_a_request_says_of_itself_is_read():
    document = {
        "id": "7",
        "parameters": {"priority": 2, "timeout": 1_500_000, "temperature": 0.5},
        "inputs": [X],
        "outputs": [{"name": "z"}, {"name": "y", "parameters": {"binary_data": True}}],
    }
    request, wanted = _decode(document, model="m:score", version="3", received=100.0)
    assert (request.model, request.function, request.version) == ("m", "score", "3")
    assert (request.id, request.priority, request.deadline) == ("7", 2, 101.5)
    assert request.outputs == ("z", "y")
    assert request.parameters == {"temperature": 0.5}
    assert [each.binary for each in wanted.outputs] == [False, True]


@pytest.mark.parametrize(("timeout", "deadline"), [(None, 110.0), (5e7, 110.0), (1e6, 101.0)])
def test_no_request_outlives_the_servers_own_limit(timeout, deadline):
    parameters = {} if timeout is None else {"timeout": int(timeout)}
    request, _ = _decode({"inputs": [X], "parameters": parameters}, received=100.0)
    assert request.deadline == deadline


def test_the_same_text_with_other_tensors_is_read_anew():
    decoder = Decoder(LIMITS, SharedMemory())
    for value in (1.0, 2.0):
        array = np.full((2,), value, np.float32)
        text = orjson.dumps({"inputs": [_binary("x", array, "FP32")]})
        request, _ = decoder.decode(text + array.tobytes(), len(text), "m")
        assert request.inputs["x"].tolist() == [value, value]
    with pytest.raises(ServingError, match="7 bytes follow the JSON"):
        decoder.decode(text + b"1234567", len(text), "m")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"id":"a","inputs":[%b]}', "a"),
        (b' { "id" : "b c" , "inputs":[%b]}', "b c"),
        (b'{"id":"a\\n","inputs":[%b]}', "a\n"),
        (b'{"id":"\xc3\xa9","inputs":[%b]}', "\u00e9"),
        (b'{"inputs":[%b],"id":"d"}', "d"),
        (b'{"id":"a","inputs":[%b],"id":"e"}', "e"),
        (b'{"id":"","inputs":[%b]}', ""),
        (b'{"inputs":[%b]}', ""),
    ],
)
def test_an_id_is_read_wherever_it_stands_and_never_kept(text, name):
    array = np.ones(2, np.float32)
    decoder = Decoder(LIMITS, SharedMemory())
    other = b'{"id":"other","inputs":[%b]}'
    for shown, wanted_name in ((other, "other"), (text, name), (text, name), (other, "other")):
        header = shown % orjson.dumps(_binary("x", array, "FP32"))
        request, wanted = decoder.decode(header + array.tobytes(), len(header), "m")
        assert (request.id, wanted.id) == (wanted_name, wanted_name)
        assert request.inputs["x"].tolist() == [1, 1]


def test_nan_is_read_as_a_word_and_as_a_string():
    text = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[NaN,-Infinity,"NaN"]}]}'
    request, _ = _decode(text)
    np.testing.assert_array_equal(request.inputs["x"], [np.nan, -np.inf, np.nan])


def _with(**changes: object) -> dict:
    return {"inputs": [{**X, **changes}]}


def _size(size: object) -> dict:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2]}
    return {"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}


REFUSED = [
    (b"", None, "not JSON"),
    (b"[1]", None, "not a JSON object"),
    (b"\xff\xfe", None, "not JSON"),
    (b'{"inputs":[NaN', None, "not JSON"),
    (b'{"a":' * 2000, None, "not JSON"),
    (b'{"NaN":' + b"[" * 100_000, None, "not JSON"),
    (b'{"x": NaN, "y": ' + b"1" * 5000 + b"}", None, "not JSON"),
    ({}, None, "has no inputs"),
    ({"inputs": []}, None, "has no inputs"),
    ({"inputs": {}}, None, "inputs is not a list"),
    ({"inputs": [X] * 5}, None, "inputs has 5 tensors; this server takes 4"),
    ({"inputs": [X, X]}, None, "'x' twice"),
    ({"inputs": [1]}, None, "an input is not a JSON object"),
    ({"inputs": [{}]}, None, "an input has no name"),
    ({"inputs": [X], "outputs": [{"name": "y"}, {"name": "y"}]}, None, "'y' twice"),
    ({"inputs": [X], "outputs": [{"name": ""}]}, None, "an output has no name"),
    ({"inputs": [X], "model": "m"}, None, "the key 'model'"),
    ({"inputs": [X], "id": 7}, None, "id is not a string"),
    ({"inputs": [X], "parameters": []}, None, "parameters is not a JSON object"),
    ({"inputs": [X], "parameters": {"priority": -1}}, None, "priority=-1"),
    ({"inputs": [X], "parameters": {"timeout": 1.5}}, None, "timeout=1.5"),
    ({"inputs": [X], "parameters": {"binary_data_output": 1}}, None, "binary_data_output=1"),
    ({"inputs": [X], "parameters": {"function": 1}}, None, "function=1"),
    ({"inputs": [X], "parameters": {"sequence_id": 5}}, None, "sequences are not served"),
    (_with(shape="2"), None, "no shape"),
    (_with(shape=[2, "a"]), None, "sizes are integers"),
    (_with(shape=[300]), None, "has 1200 bytes; this server takes 1000"),
    (_with(datatype="FLOAT"), None, "'FLOAT' is not of the V2 protocol"),
    (_with(extra=1), None, "the key 'extra'"),
    (_with(parameters={"content_type": "np"}), None, "'content_type' has no meaning"),
    (_with(parameters={"binary_data_size": 8}), b"12345678", "several sources"),
    ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}]}, None, "no data"),
    (_size(8), None, "0 bytes follow the JSON where its inputs' binary_data_size sum to 8"),
    (_size(8), b"1234", "4 bytes follow"),
    (_size(8), b"123456789", "9 bytes follow"),
    (_size(-8), b"", "binary_data_size=-8 is not a size"),
    (_size("8"), b"12345678", "binary_data_size='8' is not a size"),
    (_size(4), b"1234", "binary_data_size=4 where FP32 of shape [2] takes 8"),
    (_size(2**62), b"", "bytes; this server takes 1000 a tensor"),
    (_with(parameters={"shared_memory_region": "r"}), None, "without shared_memory_byte_size"),
]


@pytest.mark.parametrize(("document", "behind", "words"), REFUSED)
def test_what_is_wrong_is_refused_with_the_reason(document, behind, words):
    with pytest.raises(ServingError) as refused:
        _decode(document, behind)
    assert words in str(refused.value)
    assert refused.value.code in (
        ServingCode.INVALID_ARGUMENT,
        ServingCode.UNIMPLEMENTED,
        ServingCode.TOO_LARGE,
    )


@pytest.mark.parametrize("header", [0, 10**9])
def test_a_lying_header_length_is_refused(header):
    with pytest.raises(ServingError, match="is not a size of JSON in a body of 4 bytes"):
        Decoder(LIMITS, SharedMemory()).decode(b"{}12", header, "m")


@pytest.mark.parametrize("text", [b"[" + b"[]," * 2**20 + b"1]", b"[" + b'"",' * 2**21 + b'""]'])
def test_json_that_swells_while_it_is_read_is_refused(text):
    tracemalloc.start()
    with pytest.raises(ServingError, match="more lists or texts") as refused:
        _decode(b'{"inputs":%b}' % text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.code is ServingCode.TOO_LARGE
    assert peak < 5 * len(text)


def test_two_names_of_a_function_are_refused():
    with pytest.raises(ServingError, match="asks for function 'a'"):
        _decode({"inputs": [X], "parameters": {"function": "b"}}, model="m:a")


def test_lying_sizes_allocate_nothing():
    tracemalloc.start()
    for shape in ([2**33], [2**20, 2**13], [10**18]):
        for datatype in ("FP32", "BYTES"):
            with pytest.raises(ServingError):
                _decode({"inputs": [{**X, "shape": shape, "datatype": datatype, "data": []}]})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def _answer(document: dict, outputs: dict[str, np.ndarray], **options) -> tuple[dict, list]:
    _, wanted = _decode({"inputs": [X], **document}, **options)
    text, binary = encode(InferResult("m", "3", "f", "", outputs), wanted)
    return orjson.loads(text), binary


def test_an_answer_has_the_outputs_as_they_were_asked_for():
    outputs = {"y": np.array([[1.5, np.nan]], np.float32), "n": np.arange(2)}
    answer, binary = _answer({"id": "a"}, outputs)
    assert answer["id"] == "a"
    assert (answer["model_name"], answer["model_version"]) == ("m", "3")
    assert answer["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, "NaN"]},
        {"name": "n", "datatype": "INT64", "shape": [2], "data": [0, 1]},
    ]
    assert binary == []
    asked = {"outputs": [{"name": "n", "parameters": {"binary_data": True}}, {"name": "y"}]}
    answer, binary = _answer(asked, outputs)
    assert "id" not in answer
    assert [each["name"] for each in answer["outputs"]] == ["n", "y"]
    assert answer["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert binary == [np.arange(2).tobytes()]


def test_an_output_goes_to_shared_memory_if_it_fits(tmp_path):
    (tmp_path / "object").write_bytes(bytes(32))
    memory = SharedMemory(folder=tmp_path)
    memory.register("r", "object", 32)
    span = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 8}
    document = {"outputs": [{"name": "y", "parameters": span}]}
    outputs = {"y": np.arange(2)}
    answer, binary = _answer(document, outputs, memory=memory)
    assert answer["outputs"][0]["parameters"] == span
    assert binary == []
    assert (tmp_path / "object").read_bytes()[8:24] == np.arange(2).tobytes()
    with pytest.raises(ServingError, match="has 24 bytes; shared_memory_byte_size leaves it 16"):
        _answer(document, {"y": np.arange(3)}, memory=memory)


def test_classes_are_the_largest_of_each_row():
    scores = np.array([[0.1, 3, 2], [5, 5, np.nan]], np.float32)
    asked = {"outputs": [{"name": "y", "parameters": {"classification": 2}}]}
    answer, _ = _answer(asked, {"y": scores})
    assert answer["outputs"][0]["datatype"] == "BYTES"
    assert answer["outputs"][0]["shape"] == [2, 2]
    assert answer["outputs"][0]["data"] == [
        "3.000000:1",
        "2.000000:2",
        "5.000000:0",
        "5.000000:1",
    ]
    assert classify("y", np.arange(3), 10).shape == (3,)
    with pytest.raises(ServingError, match="not a row of numbers"):
        classify("y", np.array([b"a"], object), 1)
