"""gRPC clients of a running `fornax host`: Triton's own, and those that vanish, flood or dawdle."""

import asyncio
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import grpc.aio
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import json_format
from tests.integration.serving.conftest import WIDE, write_tiny
from tritonclient.utils import InferenceServerException

from fornax import export
from fornax.config import ServingCode, ServingError
from fornax.export import Spec
from fornax.serving.grpc.client import Client, infer_message, outputs_of
from fornax.serving.grpc.inference_pb2 import ModelConfig
from fornax.serving.grpc.methods import METHODS

pytestmark = pytest.mark.slow

_INFER = METHODS["ModelInfer"].path
_STREAM = METHODS["ModelStreamInfer"].path
_BIG = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def _half(params, h):
    return {"h": h * jnp.bfloat16(3)}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return write_tiny(
        tmp_path_factory.mktemp("models"), "half", _half, {"h": Spec(("b", 2), "bfloat16")}, 8
    )


@pytest.fixture(scope="module")
def server(models, start_once):
    """One for most; clients that behave badly must leave it as it was."""
    return start_once(models, "--control", "explicit", "--load", "*")


def _tensors(**arrays):
    tensors = []
    for name, (datatype, array) in arrays.items():
        tensors.append(triton.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    return tensors


_X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
_SCALE = np.array([1.0, 0.5], np.float32)


def _inputs():
    return _tensors(x=("FP32", _X), scale=("FP32", _SCALE))


def test_tritons_client_does_all_that_it_can(models, server):
    original = {version: export.load(models / "tiny" / str(version)) for version in "12"}
    with triton.InferenceServerClient(server.address("grpc")) as client:
        assert client.is_server_ready()
        assert list(client.get_model_metadata("tiny").versions) == ["1", "2"]
        first = client.get_inference_statistics("tiny", "2").model_stats[0].inference_stats
        for version in "12":
            got = client.infer("tiny", _inputs(), model_version=version).as_numpy("y")
            wanted = original[version]["predict"](x=_X, scale=_SCALE)["y"]
            assert got.tobytes() == wanted.tobytes()
        half = np.array([[1.5, -2.0]], np.float32)
        got = client.infer("tiny:half", _tensors(h=("BF16", half))).as_numpy("h")
        assert got.tolist() == [[4.5, -6.0]]
        words = np.array([b"abc", b"", b"0123456789"], np.object_)
        got = client.infer(
            "tiny", _tensors(s=("BYTES", words)), parameters={"function": "text"}
        ).as_numpy("length")
        assert got.tolist() == [3, 0, 10]

        answers, room = queue.Queue(), threading.Semaphore(8)

        def answered(result, error):
            answers.put((result, error))
            room.release()

        client.start_stream(answered)
        for number in range(30):
            assert room.acquire(timeout=120)
            wrong = number % 10 == 3
            client.async_stream_infer(
                "tiny", _inputs()[: 1 if wrong else 2], request_id=str(number)
            )
        for number in range(30):
            result, error = answers.get(timeout=120)
            if number % 10 == 3:
                assert "lacks scale" in error.message()
            else:
                assert result.get_response().id == str(number)
        client.stop_stream()

        stats = client.get_inference_statistics("tiny", "2").model_stats[0]
        assert stats.inference_stats.success.count - first.success.count == 27 + 3
        assert stats.inference_stats.fail.count - first.fail.count == 3
        assert stats.execution_count <= stats.inference_count
        assert {batch.batch_size for batch in stats.batch_stats} <= {1, 4}
        assert stats.memory_usage[0].byte_size > 0

        client.unload_model("tiny")
        assert not client.is_model_ready("tiny")
        with pytest.raises(InferenceServerException) as caught:
            client.infer("tiny", _inputs())
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        client.load_model("tiny")
        assert client.is_model_ready("tiny", "1")


def test_what_a_host_says_of_a_model_fits_tritons_configuration(models):
    from fornax.serving.config import HostConfig
    from fornax.serving.host import Host

    async def config():
        host = Host(HostConfig(repository=models, control="explicit", load=("*",)))
        await host.start()
        found = host.config("tiny")
        await host.stop(0)
        return found

    found = json_format.ParseDict(asyncio.run(config()), ModelConfig())
    assert found.max_batch_size == 4
    assert found.input[0].data_type == 11


def _quiet(server) -> None:
    """Wait until the server has nothing to do; it must answer correctly."""
    url = server.address("grpc")
    with Client(url) as client:
        until = time.monotonic() + 120
        while True:
            stats = client.call("ModelStatistics", name="tiny").model_stats
            before = [each.execution_count for each in stats]
            time.sleep(0.3)
            stats = client.call("ModelStatistics", name="tiny").model_stats
            if before == [each.execution_count for each in stats]:
                break
            assert time.monotonic() < until
        for value in range(3):
            x = np.full((1, WIDE), value, np.float32)
            assert (client.infer("tiny:wide", {"x": x})["x"] == value + 1).all()


_VANISHING = f"""
import sys, grpc, numpy as np
from fornax.serving.grpc.client import infer_message
data = infer_message("tiny:wide", {{"x": np.ones((4, {WIDE}), np.float32)}}).SerializeToString()
def endless():
    while True:
        yield data
channel = grpc.insecure_channel(sys.argv[1], {_BIG!r})
for number, answer in enumerate(channel.stream_stream({_STREAM!r})(endless())):
    if number == 20:
        print("streaming", flush=True)
"""


@pytest.mark.fault
def test_clients_that_vanish_mid_stream_leave_nothing_behind(server):
    def round_of_vanishing():
        command = [sys.executable, "-c", _VANISHING, server.address("grpc")]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for client in clients:
            assert client.stdout.readline() == b"streaming\n"
        for client in clients:
            client.send_signal(signal.SIGKILL)
            client.communicate()
        _quiet(server)

    round_of_vanishing()
    before = server.memory()
    round_of_vanishing()
    server.returns_to(before)


@pytest.mark.fault
def test_readers_that_dawdle_hold_a_bounded_share(models, start):
    server = start(models, "--send-timeout", "2")
    data = infer_message("tiny:wide", {"x": np.ones((4, WIDE), np.float32)}).SerializeToString()
    before = server.memory()
    caught = None
    for seconds in (3, 10, 40):  # a busy machine may need longer until nothing moves any more
        enough, sent = threading.Event(), [0]

        def requests(enough=enough, sent=sent):
            while not enough.is_set():
                sent[0] += 1
                yield data

        with grpc.insecure_channel(server.address("grpc"), _BIG) as channel:
            answers = channel.stream_stream(_STREAM)(requests())
            _quiet(server)  # others are served meanwhile
            assert sent[0] < 400
            assert server.memory() - before < 2**29
            time.sleep(seconds)
            enough.set()
            try:
                for _ in answers:
                    pass
            except grpc.RpcError as error:
                caught = error
                break
    assert caught is not None
    assert caught.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "read answers as they come" in caught.details()


@pytest.mark.fault
def test_ten_times_too_many_requests_are_answered_or_refused(server):
    url = server.address("grpc")
    refused = {ServingCode.RESOURCE_EXHAUSTED.name, ServingCode.DEADLINE_EXCEEDED.name}

    async def flood(callers, seconds, function="wide", width=WIDE):
        """Count answers by status; every answer is looked at."""
        counts: dict[str, int] = {}
        end = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(url, _BIG) as channel:
            call = channel.unary_unary(_INFER)

            async def caller(number):
                x = np.full((1, width), number, np.float32)
                data = infer_message(f"tiny:{function}", {"x": x}).SerializeToString()
                last = False
                while not last:
                    last = time.monotonic() >= end
                    try:
                        answer = await call(data, timeout=600)
                    except grpc.aio.AioRpcError as error:
                        status = error.code().name
                    else:
                        found = METHODS["ModelInfer"].response.FromString(answer)
                        got = outputs_of(found)["x"]
                        status = "OK" if (got == number + 1).all() else "WRONG"
                    counts[status] = counts.get(status, 0) + 1

            await asyncio.gather(*(caller(number) for number in range(callers)))
        return counts

    # Eight may wait; a batch takes so long that many more come.
    counts = asyncio.run(flood(640, 2, "slow", 4))
    assert set(counts) <= {"OK", *refused}
    assert counts["OK"] >= 4
    assert counts["RESOURCE_EXHAUSTED"] > 10

    # Large ones leave no memory taken.
    asyncio.run(flood(64, 1))
    _quiet(server)
    before = server.memory()
    for seconds in (2, 1):
        counts = asyncio.run(flood(640, seconds))
        assert set(counts) <= {"OK", *refused}
        assert counts["OK"] >= 4
        _quiet(server)
    server.returns_to(before)
    with Client(url) as client, pytest.raises(ServingError) as caught:
        client.infer("tiny:half", {"h": np.ones((1, 3), ml_dtypes.bfloat16)})
    assert caught.value.code is ServingCode.INVALID_ARGUMENT


def test_a_stop_answers_what_was_taken(server):
    outcomes = []

    def calls():
        with Client(server.address("grpc")) as client:
            while True:
                x = np.full((1, WIDE), len(outcomes), np.float32)
                try:
                    got = client.infer("tiny:wide", {"x": x})["x"]
                except ServingError as error:
                    outcomes.append(error.code)
                    return
                outcomes.append(bool((got == x + 1).all()))

    callers = [threading.Thread(target=calls) for _ in range(4)]
    for caller in callers:
        caller.start()
    while len(outcomes) < 40 and any(caller.is_alive() for caller in callers):
        time.sleep(0.01)
    assert server.stop() == 0
    for caller in callers:
        caller.join()
    refused = [each for each in outcomes if each is not True]
    assert refused == [ServingCode.UNAVAILABLE] * 4
