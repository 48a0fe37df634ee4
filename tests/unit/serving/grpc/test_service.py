"""The service by bare gRPC: tokens, TLS, health, reflection, limits, broken bytes, stopping."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serving.certificate import certify

from fornax.config import ConfigError, ServingCode, ServingError
from fornax.serving.access import Auth, Limits, Tls
from fornax.serving.config import Address, parse_address
from fornax.serving.grpc.client import Client, infer_message, outputs_of
from fornax.serving.grpc.methods import METHODS
from fornax.serving.grpc.server import GrpcServer

_X = {"x": np.arange(4, dtype=np.float32)}
_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def channel(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def _status(call, data, metadata=()):
    """The status and details of a call of bare bytes."""
    try:
        call(data, timeout=120, metadata=metadata)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


def test_our_client(served):
    with Client(served.address) as client:
        assert client.ready()
        assert client.ready("echo", "1")
        assert not client.ready("nobody")
        assert client.infer("echo", _X)["x"].tolist() == [0, 1, 2, 3]
        assert client.metadata("echo").inputs[0].shape == (-1, 4)
        client.load("mine", "4")
        assert client.ready("mine", "4")
        client.unload("mine")
        assert client.call("ModelStatistics", name="echo").model_stats[0].version == "1"
        with pytest.raises(ServingError, match="nobody") as caught:
            client.infer("nobody", _X)
        assert caught.value.code is ServingCode.NOT_FOUND
    with Client("127.0.0.1:9", timeout=120) as client, pytest.raises(ServingError) as caught:
        client.ready()
    assert caught.value.code is ServingCode.UNAVAILABLE
    with pytest.raises(ConfigError, match="/nothing"):
        Client("127.0.0.1:9", ca=Path("/nothing"))


def test_the_request_id_may_come_as_metadata(served, channel):
    call = channel.unary_unary(METHODS["ModelInfer"].path)
    call(infer_message("echo", _X).SerializeToString(), metadata=(("x-request-id", "m7"),))
    assert served.host.requests[-1].id == "m7"


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("ModelInfer", infer_message("echo", _X).SerializeToString(), grpc.StatusCode.OK),
        ("ModelInfer", infer_message("nobody", _X).SerializeToString(), grpc.StatusCode.NOT_FOUND),
        ("ModelInfer", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("ServerMetadata", b"", grpc.StatusCode.OK),
        ("ServerMetadata", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_every_call_has_an_id_behind_its_answer(served, channel, name, data, code):
    def id_of(*given):
        metadata = tuple(("x-request-id", each) for each in given)
        outcome = channel.unary_unary(METHODS[name].path).future(data, metadata=metadata)
        assert outcome.code() is code
        [found] = [value for key, value in outcome.trailing_metadata() if key == "x-request-id"]
        return found

    assert id_of("m8") == "m8"
    made = id_of("two words")
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert id_of() != made


def test_a_stream_has_one_id(served, channel):
    call = channel.stream_stream(METHODS["ModelStreamInfer"].path)
    data = infer_message("echo", _X, id="mine").SerializeToString()
    outcome = call(iter([data, data]), metadata=(("x-request-id", "s1"),), timeout=120)
    assert len(list(outcome)) == 2
    assert dict(outcome.trailing_metadata())["x-request-id"] == "s1"
    assert [(each.id, each.request_id) for each in served.host.requests[-2:]] == [
        ("mine", "s1")
    ] * 2


_METHODS = [name for name, method in METHODS.items() if not method.streams]


@settings(max_examples=150)
@given(name=st.sampled_from(_METHODS), data=st.binary(max_size=60))
def test_bytes_that_are_no_message_are_the_clients_fault(channel, name, data):
    if name.endswith(("Load", "Unload", "Settings")):
        data = b"\xff" + data  # what changes the host is not called at random
    status, _ = _status(channel.unary_unary(METHODS[name].path), data)
    assert status in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")


def test_broken_bytes_do_not_end_a_stream(channel):
    good = infer_message("echo", _X, id="good").SerializeToString()
    call = channel.stream_stream(METHODS["ModelStreamInfer"].path)
    answers = list(call(iter([good, b"\xff\xff", good]), timeout=120))
    found = [METHODS["ModelStreamInfer"].response.FromString(each) for each in answers]
    assert [each.error_message[:10] for each in found] == ["", "2 bytes ar", ""]
    assert outputs_of(found[2].infer_response)["x"].tolist() == [0, 1, 2, 3]


def test_refusals_are_told_to_the_listeners(served, channel):
    heard = []
    served.host.events.refused.append(heard.append)
    message = infer_message("echo", _X, id="r1")
    message.inputs[0].datatype = "FP128"
    _status(channel.unary_unary(METHODS["ModelInfer"].path), message.SerializeToString())
    served.host.events.refused.clear()
    (refusal,) = heard
    assert (refusal.protocol, refusal.model, refusal.id) == ("grpc", "echo", "r1")
    assert refusal.code is ServingCode.INVALID_ARGUMENT


def test_long_and_foreign_words_fit_the_status(channel):
    message = infer_message("echo", {"é" * 40_000: _X["x"]}, outputs=("ü" * 70_000,))
    call = channel.unary_unary(METHODS["ModelInfer"].path)
    status, details = _status(call, message.SerializeToString())
    assert status == "INVALID_ARGUMENT"
    assert 1000 < len(details) <= 2048


def test_at_most_so_many_requests_are_taken(serve):
    served = serve(limits=Limits(max_concurrent_requests=2))
    with grpc.insecure_channel(served.address) as channel:
        call = channel.unary_unary(METHODS["ModelInfer"].path)
        slow = infer_message("slow", _X, parameters={"seconds": "600"}).SerializeToString()
        running = [call.future(slow), call.future(slow)]
        while served.server.running < 2:
            time.sleep(0.005)
        with grpc.insecure_channel(served.address, [("grpc.use_local_subchannel_pool", 1)]) as more:
            status, details = _status(more.unary_unary(METHODS["ModelInfer"].path), slow)
        assert status == "RESOURCE_EXHAUSTED"
        assert "2 requests" in details
        for each in running:
            each.cancel()


def test_health_follows_the_server_and_its_models(served, channel):
    check = channel.unary_unary(
        _CHECK,
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )

    def status(service):
        return check(health_pb2.HealthCheckRequest(service=service), timeout=120).status

    assert [status(name) for name in ("", "echo", "echo/2")] == [_SERVING] * 3
    assert status("inference.GRPCInferenceService") == _SERVING
    assert status("gone") == _NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        status("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    served.host.is_ready = False
    assert status("") == _NOT_SERVING
    served.host.is_ready = True


def test_health_lists_the_models(channel):
    names = channel.unary_unary(
        "/grpc.health.v1.Health/List",
        response_deserializer=health_pb2.HealthListResponse.FromString,
    )(b"", timeout=120).statuses
    assert {"", "inference.GRPCInferenceService"} < set(names)
    assert names["echo"].status == _SERVING
    assert names["gone"].status == _NOT_SERVING


def test_a_watch_hears_of_changes(served, channel):
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest(service="watched"), timeout=120)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    served.run(served.host.load("watched"))
    assert next(watch).status == _SERVING
    served.run(served.host.unload("watched"))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_reflection_describes_all_services(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    pool = DescriptorPool(database)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert len(service.methods) == len(METHODS)
    config = pool.FindMessageTypeByName("inference.ModelConfig")
    assert config.fields_by_name["max_batch_size"].number == 4
    assert pool.FindServiceByName("grpc.health.v1.Health").file.name.endswith("health.proto")
    newer = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    assert list(database.get_services()) == [
        each.name
        for each in reflection_pb2.ServerReflectionResponse.FromString(
            next(channel.stream_stream(newer)(iter([b"\x3a\x00"]), timeout=120))
        ).list_services_response.service
    ]
    with pytest.raises(KeyError):
        pool.FindMessageTypeByName("inference.Nothing")


def test_tokens(serve):
    served = serve(
        auth=Auth(tokens=("user", "boss")), admin=Auth(tokens=("boss",)), trace_sample_rate=0.5
    )
    with Client(served.address) as client:
        assert client.ready()
        with pytest.raises(ServingError, match="none was sent") as caught:
            client.infer("echo", _X)
        assert caught.value.code is ServingCode.UNAUTHENTICATED
    assert served.host.events.refusals["grpc", "UNAUTHENTICATED"] == 1
    stranger = Client(served.address, token="wrong")
    with stranger as client, pytest.raises(ServingError, match="none that this server knows"):
        client.metadata("echo")
    with Client(served.address, token="user") as client:
        assert client.infer("echo", _X)["x"].size == 4
        for change in ("RepositoryModelLoad", "SystemSharedMemoryStatus", "TraceSetting"):
            with pytest.raises(ServingError, match="token"):
                client.call(change)
    with Client(served.address, token="boss") as client:
        client.load("echo")
        assert client.call("TraceSetting").settings["trace_rate"].value == ["2"]
        with pytest.raises(ServingError, match="takes 1048576"):
            client.metadata("x" * 2**20)
    with grpc.insecure_channel(served.address) as channel:
        assert _status(channel.unary_unary(_CHECK), b"")[0] == "OK"
        named = channel.unary_unary("/grpc.health.v1.Health/List")
        assert _status(named, b"")[0] == "UNAUTHENTICATED"
        call = channel.stream_stream(METHODS["ModelStreamInfer"].path)
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([b""]), timeout=120))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tls_with_certificates_of_both_sides(serve, tmp_path):
    tls = certify(tmp_path)
    served = serve(tls=tls)
    with Client(served.address, ca=tls.cert) as client:
        assert client.infer("echo", _X)["x"].size == 4
    with Client(served.address, timeout=1) as client, pytest.raises(ServingError):
        client.ready()
    strict = serve(tls=Tls(cert=tls.cert, key=tls.key, client_ca=tls.cert))
    with Client(strict.address, ca=tls.cert, timeout=1) as client, pytest.raises(ServingError):
        client.ready()
    with Client(strict.address, ca=tls.cert, cert=tls.cert, key=tls.key) as client:
        assert client.ready()
    with pytest.raises(ConfigError, match="cannot be read"):
        served.run(
            GrpcServer(
                served.host, Address("127.0.0.1", 0), tls=Tls(cert=Path("/no"), key=tls.key)
            ).start()
        )


def test_a_request_that_the_host_drops_is_to_be_sent_again(served, channel):
    call = channel.unary_unary(METHODS["ModelInfer"].path)
    slow = infer_message("slow", _X, parameters={"seconds": "600"}).SerializeToString()
    running = call.future(slow, timeout=120)
    while not served.host.futures or served.host.futures[-1].done():
        time.sleep(0.005)
    served.loop.call_soon_threadsafe(served.host.futures[-1].cancel)
    assert running.exception().code() is grpc.StatusCode.UNAVAILABLE
    assert "send this again" in running.exception().details()


def test_a_taken_port_is_an_error(serve, served):
    taken = parse_address("grpc", served.address)
    with pytest.raises(OSError, match="cannot listen"):
        served.run(GrpcServer(served.host, taken).start())


def test_answers_may_be_compressed_and_limits_be_huge(serve):
    limits = Limits(max_body_bytes=2**40, keep_alive=1e9, max_concurrent_requests=2**30)
    served = serve(compression="gzip", limits=limits)
    with Client(served.address) as client:
        assert client.infer("echo", {"x": np.zeros(10_000)})["x"].sum() == 0


def test_stopping_answers_what_runs_and_ends_streams(serve):
    served = serve()
    slow = infer_message("slow", _X, parameters={"seconds": "600"}).SerializeToString()
    go_on = threading.Event()

    def requests():
        yield slow
        go_on.wait(600)

    with grpc.insecure_channel(served.address) as channel:
        unary = channel.unary_unary(METHODS["ModelInfer"].path).future(slow)
        stream = channel.stream_stream(METHODS["ModelStreamInfer"].path)(requests())
        while len(served.host.slow) < 2:
            time.sleep(0.005)
        stopping = asyncio.run_coroutine_threadsafe(served.server.stop(600), served.loop)
        served.loop.call_soon_threadsafe(served.host.answer_slow)
        stopping.result(120)
        assert unary.result().startswith(b"\n")
        assert next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopping" in caught.value.details()
        go_on.set()


def test_the_client_brings_neither_jax_nor_a_server():
    heavy = ("jax", "fornax.export", "fornax.serving.grpc.server", "fastapi", "uvloop")
    code = f"""
import sys
from fornax.serving.grpc import Client
from fornax.serving.config import Address, parse_address
from fornax.serving.grpc.client import infer_message
print([name for name in {heavy!r} if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
