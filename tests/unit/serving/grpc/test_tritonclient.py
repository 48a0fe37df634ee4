"""Triton's own client against the server: plain, asynchronous, streaming, shared memory."""

import asyncio
import queue
import time
from multiprocessing.shared_memory import SharedMemory

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def client(served):
    with triton.InferenceServerClient(served.address) as client:
        yield client


def _input(array, datatype="FP32", name="x"):
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


_X = np.arange(8, dtype=np.float32).reshape(2, 4)


def _refused(status, call, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **kwargs)
    assert caught.value.status() == f"StatusCode.{status}"
    return caught.value.message()


def test_what_the_server_and_its_models_say_of_themselves(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo", "2")
    assert not client.is_model_ready("echo", "9")
    about = client.get_server_metadata()
    assert about.name == "fornax"
    assert "system_shared_memory" in about.extensions
    metadata = client.get_model_metadata("echo")
    assert list(metadata.versions) == ["1", "2"]
    assert list(metadata.inputs[0].shape) == [-1, 4]
    config = client.get_model_config("echo").config
    assert config.max_batch_size == 8
    assert config.input[0].data_type == 11
    assert config.dynamic_batching.max_queue_delay_microseconds == 50
    stats = client.get_inference_statistics("echo", as_json=True)["model_stats"][0]
    assert stats["inference_stats"]["success"] == {"count": "3", "ns": "9000"}
    assert stats["batch_stats"][0]["batch_size"] == "8"
    assert "no model" in _refused("NOT_FOUND", client.get_model_metadata, "nobody")


def test_models_are_listed_loaded_and_unloaded(client):
    index = client.get_model_repository_index(as_json=True)["models"]
    assert {"name": "gone", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in index
    client.load_model("extra")
    assert client.is_model_ready("extra")
    client.unload_model("extra", unload_dependents=True)
    assert not client.is_model_ready("extra")
    assert "no folder" in _refused("NOT_FOUND", client.load_model, "missing")
    words = _refused("INVALID_ARGUMENT", client.load_model, "echo", config="{}")
    assert "'config' has no meaning here" in words


def test_one_inference(served, client):
    result = client.infer(
        "echo",
        [_input(_X), _input(-_X, name="y")],
        model_version="1",
        outputs=[triton.InferRequestedOutput("y")],
        request_id="seven",
        priority=2,
        timeout=3_000_000,
        parameters={"seed": 3},
        headers={"traceparent": "00-1-2-01"},
        client_timeout=120,
    )
    assert result.as_numpy("y").tobytes() == (-_X).tobytes()
    assert result.as_numpy("x") is None
    assert result.get_response().id == "seven"
    request = served.host.requests[-1]
    assert (request.priority, request.parameters, request.trace) == (2, {"seed": 3}, "00-1-2-01")
    assert request.deadline - request.received == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("BOOL", np.array([[True, False]])),
        ("INT64", np.array([[-(2**62)]])),
        ("UINT8", np.array([[255]], np.uint8)),
        ("FP16", np.array([[1.5]], np.float16)),
        ("FP64", np.array([[1e300]])),
        ("BYTES", np.array([[b"", b"\xff\0"]], np.object_)),
        ("FP32", np.zeros((0, 4), np.float32)),
    ],
)
def test_dtypes_and_empty_tensors(client, datatype, array):
    got = client.infer("echo", [_input(array, datatype)]).as_numpy("x")
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()


def test_bfloat16_keeps_its_bits(client):
    # The client holds BF16 as float32 and cuts it at 16 bits.
    array = np.array([[1.0, -2.5, 3e38]]).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert client.infer("echo", [_input(array, "BF16")]).as_numpy("x").tolist() == array.tolist()


def test_failures_are_told_by_status(client, caplog):
    assert "no model" in _refused("NOT_FOUND", client.infer, "nobody", [_input(_X)])
    wrong = triton.InferInput("x", [3], "FP32")
    wrong.set_shared_memory("nowhere", 12)
    assert "not registered" in _refused("INVALID_ARGUMENT", client.infer, "echo", [wrong])
    big = np.zeros(2**19 + 1, np.float32)
    assert "at most" in _refused("RESOURCE_EXHAUSTED", client.infer, "echo", [_input(big)])
    huge = np.zeros(2**20 + 1, np.float32)
    _refused("RESOURCE_EXHAUSTED", client.infer, "echo", [_input(huge)])
    words = _refused("INTERNAL", client.infer, "broken", [_input(_X)])
    assert "secret" not in words
    assert "secret" in caplog.text


def test_deadlines_end_the_wait(served, client):
    before = served.host.cancelled
    slow = {"seconds": "600"}
    asked = len(served.host.requests)
    for seconds in (0.1, 1.0, 10.0, 60.0):  # to a busy server a request may come too late
        late = {"client_timeout": seconds, "parameters": slow}
        _refused("DEADLINE_EXCEEDED", client.infer, "slow", [_input(_X)], **late)
        if len(served.host.requests) > asked:
            break
    assert len(served.host.requests) > asked
    assert served.host.requests[-1].deadline - served.host.requests[-1].received < seconds + 0.1
    _until(lambda: served.host.cancelled - before == len(served.host.requests) - asked)


def test_a_timeout_of_the_request_ends_it_too(served, client):
    before = served.host.cancelled
    timeout = {"timeout": 500_000, "parameters": {"seconds": "600"}}
    words = _refused("DEADLINE_EXCEEDED", client.infer, "slow", [_input(_X)], **timeout)
    assert "the time that the request had is over" in words
    _until(lambda: served.host.cancelled == before + 1 and served.server.running == 0)


def _until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_asynchronous_calls_and_their_cancelling(served, client):
    answers = queue.Queue()

    def done(result, error):
        answers.put((result, error))

    for number in range(8):
        client.async_infer("echo", [_input(_X)], done, request_id=str(number))
    got = [answers.get(timeout=120) for _ in range(8)]
    assert sorted(result.get_response().id for result, _ in got) == list("01234567")
    before = served.host.cancelled
    call = client.async_infer("slow", [_input(_X)], done, parameters={"seconds": "600"})
    _until(lambda: served.host.requests[-1].model == "slow")
    call.cancel()
    assert answers.get(timeout=120)[1].status() == "StatusCode.CANCELLED"
    _until(lambda: served.host.cancelled == before + 1 and served.server.running == 0)


def test_compressed_requests(client):
    for algorithm in ("gzip", "deflate"):
        result = client.infer("echo", [_input(_X)], compression_algorithm=algorithm)
        assert result.as_numpy("x").tolist() == _X.tolist()


def test_a_stream_answers_in_order_and_outlives_errors(client):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer("slow", [_input(_X)], timeout=1, parameters={"seconds": "600"})
        assert "time" in answers.get(timeout=120)[1].message()
        for number in range(12):
            model, seconds = [("slow", "0.05"), ("echo", "0"), ("nobody", "0")][number % 3]
            client.async_stream_infer(
                model, [_input(_X)], request_id=str(number), parameters={"seconds": seconds}
            )
        for number in range(12):
            result, error = answers.get(timeout=120)
            if number % 3 == 2:
                assert "no model 'nobody'" in error.message()
            else:
                response = result.get_response()
                assert response.id == str(number)
                assert response.parameters["triton_final_response"].bool_param
    finally:
        client.stop_stream()


def test_a_cancelled_stream_takes_its_requests_along(served, client):
    before = served.host.cancelled
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error))
    for _ in range(5):
        client.async_stream_infer("slow", [_input(_X)], parameters={"seconds": "600"})
    _until(lambda: served.server.running == 5)
    client.stop_stream(cancel_requests=True)
    assert "CANCELLED" in answers.get(timeout=120).status()
    _until(lambda: served.host.cancelled == before + 5 and served.server.running == 0)


def test_shared_memory_carries_tensors_both_ways(client):
    region = SharedMemory(create=True, size=96)
    key = f"/{region.name}"
    try:
        client.register_system_shared_memory("both", key, 96)
        region.buf[:32] = _X.tobytes()
        tensor = triton.InferInput("x", [2, 4], "FP32")
        tensor.set_shared_memory("both", 32)
        output = triton.InferRequestedOutput("x")
        output.set_shared_memory("both", 40, offset=48)
        result = client.infer("echo", [tensor, _input(_X, name="y")], outputs=[output])
        assert list(result.get_response().raw_output_contents) == [b""]
        assert result.get_output("x").parameters["shared_memory_byte_size"].int64_param == 32
        assert bytes(region.buf[48:80]) == _X.tobytes()
        status = client.get_system_shared_memory_status("both", as_json=True)["regions"]["both"]
        assert status == {"name": "both", "key": key, "byte_size": "96"}
        output.set_shared_memory("both", 31)
        words = _refused("INVALID_ARGUMENT", client.infer, "echo", [tensor], outputs=[output])
        assert "leaves it 31" in words
        client.unregister_system_shared_memory("both")
        assert not client.get_system_shared_memory_status().regions
        assert "not registered" in _refused("INVALID_ARGUMENT", client.infer, "echo", [tensor])
    finally:
        region.close()
        region.unlink()


def test_what_is_not_served_says_why(client):
    words = _refused("UNIMPLEMENTED", client.register_cuda_shared_memory, "c", b"aGFuZGxl", 0, 8)
    assert "jax" in words
    words = _refused("UNIMPLEMENTED", client.infer, "echo", [_input(_X)], sequence_id=5)
    assert "state" in words


def test_settings_are_told_and_fixed_ones_refused(client):
    traces = client.get_trace_settings(as_json=True)["settings"]
    assert traces["trace_level"] == {"value": ["OFF"]}
    assert client.update_trace_settings(settings={"trace_level": ["OFF"], "trace_rate": None})
    _refused("UNIMPLEMENTED", client.update_trace_settings, settings={"trace_rate": "7"})
    logs = client.get_log_settings(as_json=True)["settings"]
    assert logs["log_error"] == {"bool_param": True}
    _refused("INVALID_ARGUMENT", client.update_log_settings, {"log_colour": True})


def test_the_aio_client(served):
    async def run():
        async with triton_aio.InferenceServerClient(served.address) as client:
            assert await client.is_server_ready()
            results = await asyncio.gather(
                *(client.infer("echo", [_input(_X)], request_id=str(i)) for i in range(20))
            )
            assert [each.get_response().id for each in results] == [str(i) for i in range(20)]

            async def requests():
                for number in range(5):
                    yield {
                        "model_name": "echo",
                        "inputs": [_input(_X)],
                        "request_id": str(number),
                    }

            answers = client.stream_infer(requests())
            got = [result.get_response().id async for result, _ in answers]
            assert got == list("01234")

    asyncio.run(run())
