"""Triton's own HTTP client against our server, synchronous and asynchronous."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as aio
from tests.unit.serving.http.client import Client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "O"]


@pytest.fixture(scope="module")
def client(server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture(autouse=True)
def _as_new(server):
    server.call(server.host.reset)


def _array(dtype: str) -> np.ndarray:
    if dtype == "O":
        return np.array([[b"one", "zw\u00f6lf".encode(), b""]], object)
    return np.array([[0, 1, 1]]).astype(dtype)


def _input(array: np.ndarray, *, binary: bool = True, name: str = "x", datatype: str = ""):
    datatype = datatype or np_to_triton_dtype(array.dtype)
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(client, dtype, binary_in, binary_out):
    array = _array(dtype)
    outputs = [triton.InferRequestedOutput("out_x", binary_data=binary_out)]
    result = client.infer("echo", [_input(array, binary=binary_in)], outputs=outputs)
    back = result.as_numpy("out_x")
    if dtype == "O" and not binary_out:
        back = np.array([[text.encode() for text in row] for row in back.tolist()], object)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


def test_bfloat16_comes_back_without_a_list_of_outputs(client):
    array = np.array([[1.5, -2.0, 1e30]], np.float32)
    result = client.infer("echo", [_input(array, datatype="BF16")], request_id="r7")
    assert result.get_output("out_x")["datatype"] == "BF16"
    assert result.get_response()["id"] == "r7"
    np.testing.assert_allclose(result.as_numpy("out_x"), array, rtol=2**-7)


def test_an_empty_tensor_comes_back(client):
    for array in (np.zeros((0, 3), np.float32), np.zeros((0,), object)):
        assert client.infer("echo", [_input(array)]).as_numpy("out_x").shape == array.shape


@pytest.mark.parametrize("binary", [True, False])
def test_nan_and_infinity_come_back(client, binary):
    array = np.array([np.nan, np.inf, -np.inf, 1.5], np.float32)
    outputs = [triton.InferRequestedOutput("out_x", binary_data=binary)]
    back = client.infer("echo", [_input(array, binary=binary)], outputs=outputs)
    np.testing.assert_array_equal(back.as_numpy("out_x"), array)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression_both_ways(client, coding):
    array = np.tile(np.arange(100, dtype=np.int32), (100, 1))
    options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    back = client.infer("echo", [_input(array)], **options).as_numpy("out_x")
    np.testing.assert_array_equal(back, array)


def test_options_of_a_request_arrive(server, client):
    client.infer(
        "echo",
        [_input(_array("f4"))],
        model_version="1",
        priority=3,
        timeout=5_000_000,
        parameters={"function": "score", "k": 2},
    )
    request = server.host.requests[-1]
    assert (request.version, request.priority, request.function) == ("1", 3, "score")
    assert request.deadline - request.received == pytest.approx(5.0)
    assert request.parameters == {"k": 2}
    with pytest.raises(InferenceServerException, match="sequences are not served"):
        client.infer("echo", [_input(_array("f4"))], sequence_id=9, sequence_start=True)


def test_classes_and_several_outputs(client):
    inputs = [_input(np.array([[0.5, 2.0, 1.0]], np.float32)), _input(_array("i8"), name="y")]
    outputs = [
        triton.InferRequestedOutput("out_y"),
        triton.InferRequestedOutput("out_x", class_count=2),
    ]
    result = client.infer("echo", inputs, outputs=outputs)
    assert [each["name"] for each in result.get_response()["outputs"]] == ["out_y", "out_x"]
    assert result.as_numpy("out_x").tolist() == [[b"2.000000:1", b"1.000000:2"]]


def test_errors_have_their_status_and_reason(server, client):
    with pytest.raises(InferenceServerException, match="'nope'") as refused:
        client.infer("nope", [_input(_array("f4"))])
    assert refused.value.status() == "404"
    outputs = [triton.InferRequestedOutput("z")]
    with pytest.raises(InferenceServerException, match="no output among"):
        client.infer("echo", [_input(_array("f4"))], outputs=outputs)


def test_health_metadata_and_statistics(server, client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1")
    assert not client.is_model_ready("echo", "2")
    server.host.is_ready = False
    assert not client.is_server_ready()
    assert client.get_server_metadata()["name"] == "fornax"
    assert client.get_model_metadata("echo", "1")["inputs"][0]["shape"] == [-1, 4]
    assert client.get_model_config("echo")["max_batch_size"] == 8
    stats = client.get_inference_statistics("echo")["model_stats"][0]
    assert stats["inference_stats"]["success"]["count"] == 3
    assert stats["batch_stats"][0]["batch_size"] == 8
    assert client.get_inference_statistics()["model_stats"]
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert "log_info" in client.get_log_settings()


def test_models_are_loaded_and_unloaded(client):
    client.unload_model("echo")
    assert not client.is_model_ready("echo")
    states = {each["name"]: each["state"] for each in client.get_model_repository_index()}
    assert states["echo"] == "UNAVAILABLE"
    with pytest.raises(InferenceServerException, match="is unloaded"):
        client.infer("echo", [_input(_array("f4"))])
    client.load_model("echo")
    assert client.is_model_ready("echo")
    with pytest.raises(InferenceServerException, match=r"serving\.yaml"):
        client.load_model("echo", config="{}")


def test_tensors_in_shared_memory(server, client):
    key = f"fornax-test-{server.address.port}"
    path = Path("/dev/shm") / key
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    path.write_bytes(array.tobytes() + bytes(24))
    try:
        client.register_system_shared_memory("in", f"/{key}", 24)
        client.register_system_shared_memory("out", f"/{key}", 24, offset=24)
        names = [each["name"] for each in client.get_system_shared_memory_status()]
        assert names == ["in", "out"]
        tensor = triton.InferInput("x", [2, 3], "FP32")
        tensor.set_shared_memory("in", 24)
        output = triton.InferRequestedOutput("out_x")
        output.set_shared_memory("out", 24)
        result = client.infer("echo", [tensor], outputs=[output])
        assert result.get_output("out_x")["parameters"]["shared_memory_region"] == "out"
        assert path.read_bytes()[24:] == array.tobytes()
        tensor.set_shared_memory("in", 24, offset=8)
        with pytest.raises(InferenceServerException, match="outside of it"):
            client.infer("echo", [tensor])
        client.unregister_system_shared_memory("in")
        assert client.get_system_shared_memory_status("out")[0]["byte_size"] == 24
    finally:
        path.unlink()
        client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not served"):
        client.register_cuda_shared_memory("c", b"aGk=", 0, 8)


def test_the_asynchronous_client(server):
    async def run() -> None:
        async with aio.InferenceServerClient(server.url) as client:
            assert await client.is_model_ready("echo")
            arrays = [np.full((1, 4), number, np.float32) for number in range(20)]
            results = await asyncio.gather(
                *(client.infer("echo", [_input(array)]) for array in arrays)
            )
            for array, result in zip(arrays, results, strict=True):
                np.testing.assert_array_equal(result.as_numpy("out_x"), array)
            packed = await client.infer(
                "echo", [_input(_array("O"))], response_compression_algorithm="deflate"
            )
            assert packed.as_numpy("out_x").tolist() == _array("O").tolist()
            await client.unload_model("echo")
            with pytest.raises(InferenceServerException, match="is unloaded"):
                await client.infer("echo", [_input(_array("f4"))])
            await client.load_model("echo")
            assert (await client.get_model_repository_index())[0]["state"] == "READY"
            assert (await client.get_inference_statistics())["model_stats"]

    asyncio.run(run())
