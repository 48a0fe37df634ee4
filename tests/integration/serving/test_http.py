"""HTTP clients of a running `fornax host`: Triton's own, and those that vanish, flood or dawdle."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np
import orjson
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as aio
from tests.integration.serving.conftest import WIDE, write_tiny
from tests.unit.serving.http.client import Client
from tritonclient.utils import InferenceServerException

from fornax import export
from fornax.export import Spec
from fornax.serving.v2.datatypes import DTYPES

pytestmark = pytest.mark.slow

_NUMBERS = [name for name in DTYPES if name != "BYTES"]


def _every(params, **inputs):
    return {f"out_{name}": ~x if x.dtype == bool else x + x for name, x in inputs.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return write_tiny(
        tmp_path_factory.mktemp("models"),
        "every",
        _every,
        {name: Spec(("b", 3), DTYPES[name].name) for name in _NUMBERS},
        64,
    )


def _input(name: str, array: np.ndarray, datatype: str, *, binary: bool = True):
    tensor = triton.InferInput(name, list(array.shape), datatype)
    if datatype == "BF16":
        array = array.astype(np.float32)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


_X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
_SCALE = np.array([1.0, 0.5], np.float32)


def _inputs():
    return [_input("x", _X, "FP32"), _input("scale", _SCALE, "FP32")]


def _bits(array: np.ndarray, datatype: str) -> bytes:
    """BF16 reaches the client as float32."""
    return array.astype(ml_dtypes.bfloat16 if datatype == "BF16" else array.dtype).tobytes()


def test_tritons_client_gets_the_original_functions_bits(models, start):
    original = {version: export.load(models / "tiny" / str(version)) for version in "12"}
    server = start(models)
    arrays = {name: np.array([[0, 1, 3], [1, 0, 2]]).astype(DTYPES[name]) for name in _NUMBERS}
    words = np.array([b"abc", b"", "z\u00fc".encode()], object)
    with Client(server.address("http")) as client:
        for version in "12":
            got = client.infer("tiny", _inputs(), model_version=version).as_numpy("y")
            wanted_y = original[version]["predict"](x=_X, scale=_SCALE)["y"]
            assert got.tobytes() == wanted_y.tobytes()
        wanted = original["2"]["every"](**arrays)
        for binary in (True, False):
            tensors = [
                _input(name, array, name, binary=binary or name == "BF16")
                for name, array in arrays.items()
            ]
            outputs = [
                triton.InferRequestedOutput(f"out_{name}", binary_data=binary) for name in arrays
            ]
            result = client.infer("tiny:every", tensors, outputs=outputs)
            for name in arrays:
                got = result.as_numpy(f"out_{name}")
                assert _bits(got, name) == wanted[f"out_{name}"].tobytes(), name
            result = client.infer("tiny:text", [_input("s", words, "BYTES", binary=binary)])
            assert result.as_numpy("s")[0].tolist() == list(b"abc")
            assert result.as_numpy("length").tolist() == [3, 0, 3]
        packed = client.infer(
            "tiny",
            _inputs(),
            request_compression_algorithm="gzip",
            response_compression_algorithm="deflate",
        )
        assert packed.as_numpy("y").tobytes() == wanted_y.tobytes()
        metadata = client.get_model_metadata("tiny:every")
        assert {each["datatype"] for each in metadata["inputs"]} == set(_NUMBERS)
        assert client.get_model_metadata("tiny")["versions"] == ["1", "2"]
        assert client.get_model_config("tiny")["max_batch_size"] == 4
    with httpx.Client(base_url=f"http://{server.address('http')}/v2/models", timeout=60) as plain:
        body = {"x": _X.tolist(), "scale": _SCALE.tolist()}
        answer = plain.post("/tiny/generate", json=body).json()
        assert np.array(answer["y"], np.float32).tobytes() == wanted_y.tobytes()
        assert plain.post("/tiny:text/generate", json={"s": "abc"}).json()["length"] == 3
        wrong = plain.post("/tiny/generate", json={**body, "scales": 1})
        assert (wrong.status_code, "scales" in wrong.json()["error"]) == (400, True)
    assert server.stop() == 0


def test_models_statistics_shared_memory_and_refusals(models, start):
    server = start(models, "--control", "explicit", "--load", "*")
    key = f"fornax-http-{server.popen.pid}"
    path = Path("/dev/shm") / key
    path.write_bytes(_X.tobytes() + bytes(32))
    try:
        with Client(server.address("http")) as client:
            client.register_system_shared_memory("all", key, 64)
            x = triton.InferInput("x", [2, 4], "FP32")
            x.set_shared_memory("all", 32)
            y = triton.InferRequestedOutput("y")
            y.set_shared_memory("all", 32, offset=32)
            client.infer("tiny", [x, _inputs()[1]], outputs=[y])
            direct = client.infer("tiny", _inputs()).as_numpy("y")
            assert path.read_bytes()[32:56] == direct.tobytes()
            client.unregister_system_shared_memory()

            wrong = [
                ("400", "lacks scale", _inputs()[:1]),
                ("400", "x", [_input("x", _X.astype("f8"), "FP64"), _inputs()[1]]),
                ("400", "x", [_input("x", _X[:, :3].copy(), "FP32"), _inputs()[1]]),
                ("400", "z", [*_inputs(), _input("z", _X, "FP32")]),
            ]
            for status, words, tensors in wrong:
                with pytest.raises(InferenceServerException, match=words) as refused:
                    client.infer("tiny", tensors)
                assert refused.value.status() == status
            for name, version in (("nope", ""), ("tiny", "9"), ("tiny:nope", "")):
                with pytest.raises(InferenceServerException) as refused:
                    client.infer(name, _inputs(), model_version=version)
                assert refused.value.status() == "404"
            stats = client.get_inference_statistics("tiny", "2")["model_stats"][0]
            assert stats["inference_stats"]["success"]["count"] == 2
            assert stats["inference_stats"]["fail"]["count"] == len(wrong)
            assert stats["memory_usage"][0]["byte_size"] > 0

            client.unload_model("tiny")
            assert not client.is_model_ready("tiny")
            with pytest.raises(InferenceServerException) as refused:
                client.infer("tiny", _inputs())
            assert refused.value.status() == "503"
            client.load_model("tiny")
            assert client.is_model_ready("tiny", "1")
            states = {each["state"] for each in client.get_model_repository_index()}
            assert states == {"READY"}
    finally:
        path.unlink()
    assert server.stop() == 0


def _wide_request(rows: int, value: float = 1.0) -> bytes:
    array = np.full((rows, WIDE), value, np.float32)
    size = {"binary_data_size": array.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, WIDE], "parameters": size}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    head = (
        "POST /v2/models/tiny:wide/infer HTTP/1.1\r\nHost: x\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + array.nbytes}\r\n\r\n"
    )
    return head.encode() + text + array.tobytes()


@pytest.mark.fault
def test_clients_that_vanish_dawdle_and_flood_leave_nothing_behind(models, start):
    # Honest clients must be in time too, on a machine that stops them now and then.
    server = start(models, "--send-timeout", "2", "--body-timeout", "2")
    host, _, port = server.address("http").partition(":")
    request = _wide_request(4)

    def abuse(number: int) -> None:
        with socket.create_connection((host, int(port)), 120) as client:
            match number % 8:
                case 0 | 4 | 6:  # vanishes while it sends
                    client.sendall(request[: len(request) // 2])
                case 1 | 5 | 7:  # vanishes while its answer is computed or sent
                    client.sendall(request)
                case 2:  # takes a little of its answer
                    client.sendall(request)
                    client.recv(1000)
                    time.sleep(4.0)
                case 3:  # stops sending
                    client.sendall(request[:1000])
                    assert client.recv(100).startswith(b"HTTP/1.1 408")

    async def flood() -> list[str]:
        async with aio.InferenceServerClient(server.address("http")) as client:

            async def one(value: int) -> str:
                array = np.full((1, WIDE), value, np.float32)
                try:
                    got = await client.infer("tiny:wide", [_input("x", array, "FP32")])
                except InferenceServerException as error:
                    return error.status()
                assert (got.as_numpy("x") == value + 1).all()
                return "200"

            return await asyncio.gather(*(one(value) for value in range(400)))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(abuse, range(32)))
        asyncio.run(flood())
        before = server.memory()
        list(pool.map(abuse, range(160)))
        statuses = asyncio.run(flood())
    assert set(statuses) <= {"200", "429"}
    assert statuses.count("200") >= 64
    server.returns_to(before)
    with Client(server.address("http")) as client:
        for _ in range(3):
            got = client.infer("tiny", _inputs()).as_numpy("y")
            assert got.shape == (2, 3)
        stats = client.get_inference_statistics("tiny", "2")["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] > 100
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()
