"""Bodies and headers that nobody would send: never a 500, never a crash, never much memory."""

import asyncio
import gzip
import json
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.serving.http.conftest import Answer, Caller

from fornax.serving.v2.datatypes import DTYPES
from fornax.serving.v2.shared_memory import SharedMemory

EXAMPLES = pytest.mark.parametrize(
    "examples",
    [
        50,
        pytest.param(300, marks=pytest.mark.slow),
        pytest.param(5000, marks=pytest.mark.exhaustive),
    ],
)

INTEGERS = st.sampled_from([0, 1, 2, 3, -1, 8, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1])
SCALARS = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "NaN", "Infinity", "\u00e9", "../../etc/passwd", "x" * 2000])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYS = [
    "binary_data_size",
    "shared_memory_region",
    "shared_memory_byte_size",
    "shared_memory_offset",
    "binary_data",
    "classification",
    "priority",
    "timeout",
    "function",
    "binary_data_output",
    "sequence_id",
]
PARAMETERS = st.dictionaries(st.sampled_from(KEYS), INTEGERS | SCALARS, max_size=4)


def _either(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what is usual, at times anything."""
    return st.one_of(usual, usual, usual, JSON)


TENSOR = st.fixed_dictionaries(
    {
        "name": _either(st.sampled_from(["x", "y"])),
        "datatype": _either(st.sampled_from([*DTYPES])),
        "shape": _either(st.lists(INTEGERS | st.integers(0, 3), max_size=4)),
    },
    optional={
        "data": _either(st.lists(INTEGERS | st.booleans() | st.text(max_size=3), max_size=9)),
        "parameters": _either(PARAMETERS),
        "extra": JSON,
    },
)
OUTPUT = st.fixed_dictionaries(
    {"name": _either(st.sampled_from(["out_x", "out_y"]))}, optional={"parameters": PARAMETERS}
)
REQUEST = st.fixed_dictionaries(
    {"inputs": _either(st.lists(_either(TENSOR), min_size=1, max_size=3))},
    optional={
        "id": _either(st.text(max_size=5)),
        "parameters": _either(PARAMETERS),
        "outputs": _either(st.lists(_either(OUTPUT), max_size=3)),
    },
)
HEADER = st.none() | st.sampled_from(["0", "-1", "1e3", "9" * 20, "\xff", " 5", "0x10"])

GIANT = {"name": "x", "datatype": "BYTES", "shape": [2**33], "data": []}


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Caller:
    return Caller(shared_memory=SharedMemory(folder=tmp_path_factory.mktemp("shm")))


def _send(caller: Caller, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    caller.host.requests.clear()
    return asyncio.run(asyncio.wait_for(caller.call("POST", path, body, headers), 120))


def _holds(answer: Answer) -> None:
    """Whether an answer is one of those that a client may get for what it sent."""
    assert answer.status in (200, 400, 404, 413, 501, 504), answer
    if answer.status != 200:
        assert list(orjson.loads(answer.body)) == ["error"]


def _check(examples: int, test: Any) -> None:
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )(test)()


@EXAMPLES
def test_any_document_is_answered_or_refused(caller, examples):
    @given(REQUEST, st.binary(max_size=40), HEADER, st.booleans())
    @example({"inputs": [GIANT]}, b"", None, False)
    def send(document, behind, header, honest):
        text = json.dumps(document).encode()
        headers = {}
        if header is not None:
            headers["Inference-Header-Content-Length"] = header
        elif honest:
            headers["Inference-Header-Content-Length"] = str(len(text))
        _holds(_send(caller, "/v2/models/echo/infer", text + behind, headers))

    _check(examples, send)


def test_a_request_that_lies_about_sizes_allocates_little(caller):
    size = {"binary_data_size": 2**40}
    lies = [
        {"name": "x", "datatype": datatype, "shape": shape, **source}
        for datatype in ("FP32", "BYTES", "BOOL")
        for shape in ([2**33], [2**16, 2**16], [0, 2**62], [1] * 1000)
        for source in ({"data": []}, {"data": [[]] * 1000}, {"parameters": size})
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            text = orjson.dumps({"inputs": [lie]})
            headers = {"Inference-Header-Content-Length": str(len(text))}
            _holds(_send(caller, "/v2/models/echo/infer", text, headers))
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@EXAMPLES
def test_any_bytes_are_answered_or_refused(caller, examples):
    @given(
        st.binary(max_size=200) | st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"NaN" * 99]),
        st.dictionaries(
            st.sampled_from(
                [
                    "inference-header-content-length",
                    "content-encoding",
                    "accept-encoding",
                    "x-request-id",
                    "traceparent",
                    "content-type",
                    "authorization",
                ]
            ),
            st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30)
            | st.sampled_from(["gzip", "deflate", "identity", "*", "gzip;q=0"]),
        ),
    )
    def send(body, headers):
        _holds(_send(caller, "/v2/models/echo/infer", body, headers))

    _check(examples, send)


@EXAMPLES
def test_a_damaged_request_is_answered_or_refused(caller, examples):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = array.tobytes() + b"\2\0\0\0ab\1\0\0\0c"
    inputs = [
        {
            "name": "x",
            "datatype": "FP32",
            "shape": [2, 3],
            "parameters": {"binary_data_size": 24},
        },
        {"name": "y", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
    ]
    text = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    whole = text + raw

    @given(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=3)), max_size=4),
        st.integers(-3, 3),
        st.booleans(),
    )
    @example([], 0, False)
    @example([], 0, True)
    def send(damages, shift, packed):
        body = bytearray(whole)
        for at, patch in damages:
            body[at : at + len(patch)] = patch
        sent = gzip.compress(bytes(body)) if packed else bytes(body)
        headers = {"Inference-Header-Content-Length": str(len(text) + shift)}
        if packed:
            headers["Content-Encoding"] = "gzip"
        answer = _send(caller, "/v2/models/echo/infer", sent, headers)
        _holds(answer)
        if not damages and not shift:
            assert answer.body.endswith(raw)

    _check(examples, send)


@EXAMPLES
def test_any_management_call_is_answered_or_refused(caller, examples):
    paths = [
        "/v2/repository/index",
        "/v2/repository/models/echo/load",
        "/v2/repository/models/echo/unload",
        "/v2/repository/models/echo/rollback",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/trace/setting",
    ]

    @given(
        st.sampled_from(paths),
        st.dictionaries(
            st.sampled_from(["parameters", "ready", "key", "byte_size", "offset", "trace_level"]),
            JSON | st.sampled_from(["/../x", "../../etc/passwd", "/", "sem.a"]),
        )
        | JSON,
    )
    def send(path, document):
        answer = _send(caller, path, json.dumps(document).encode(), {})
        assert answer.status in (200, 400, 501), answer
        assert caller.memory.regions() == []

    _check(examples, send)
