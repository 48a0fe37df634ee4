"""gRPC through a router: real servers behind it, a real client before it."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.unit.serving.grpc.conftest import LIMITS, Served

from fornax.cluster.routing.changes import Changes
from fornax.cluster.routing.grpc_proxy import GrpcProxy
from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import Replica, ReplicaPool, RoutingConfig
from fornax.config import ServingCode, ServingError
from fornax.config.credentials import HOST_NAME, TOKEN_HEADER, Credentials
from fornax.config.tracing import Spans
from fornax.serving.access import Auth
from fornax.serving.config import Address
from fornax.serving.grpc import Client
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.client import infer_message, outputs_of
from fornax.serving.grpc.front import Front
from fornax.serving.grpc.methods import METHODS

X = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
SECONDS = 300


class Routed:
    """A router on the first upstream's loop, and its upstreams."""

    def __init__(
        self,
        upstreams: int = 2,
        front: Any = None,
        tls: bool = False,
        spans: Spans | None = None,
        **server: Any,
    ):
        self.spans = spans
        self.credentials = Credentials.make(tls=tls)
        server["credentials"] = self.credentials
        self.upstreams = [Served(**server) for _ in range(upstreams)]
        self.run = self.upstreams[0].run
        self.run(self._start(Front(address=Address("127.0.0.1", 0), limits=LIMITS, **front or {})))

    async def _start(self, front: Front) -> None:
        config = RoutingConfig(queue_timeout=1.0, policy="round-robin")
        self.pool = ReplicaPool(config, partial=True)
        self.changes, self.metrics = Changes(self.pool), RouterMetrics(self.pool)
        self.proxy = GrpcProxy(
            front, self.pool, self.changes, self.metrics, self.credentials, self.spans
        )
        for number, each in enumerate(self.upstreams):
            self.add(number, each)
        self.address = str(await self.proxy.start())

    def add(self, number: int, upstream: Served) -> Replica:
        replica = Replica(number=number, url="", grpc=upstream.address, phase="ready")
        self.pool.add(replica)
        return replica

    def asked(self) -> list[int]:
        """How many inferences each upstream was asked."""
        return [len(each.host.requests) for each in self.upstreams]

    def metric(self, name: str) -> float:
        text = self.metrics.exposition({})[0].decode()
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def close(self) -> None:
        self.run(self.proxy.stop())
        for each in reversed(self.upstreams):
            each.close()


@pytest.fixture
def router() -> Iterator[Routed]:
    made = Routed()
    yield made
    made.close()


def break_off(upstream: Served) -> None:
    """End a server's connections without a word of its own."""
    listening = upstream.server._listening
    assert listening is not None
    upstream.run(listening.stop(0))


class Stream:
    """A client's ModelStreamInfer: requests as they are put, answers as they come."""

    def __init__(self, address: str):
        self._channel = grpc.insecure_channel(address)
        call = self._channel.stream_stream(METHODS["ModelStreamInfer"].path)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call = call(iter(self._requests.get, None), timeout=SECONDS)

    def send(self, model: str, name: str = "", *, parameters: Any = None, **inputs: Any) -> None:
        message = infer_message(model, inputs or X, id=name, parameters=parameters)
        self._requests.put(message.SerializeToString())

    def read(self) -> Any:
        """The next answer: its message."""
        return pb.ModelStreamInferResponse.FromString(next(self.call))

    def end(self) -> list[Any]:
        """Send no more; what still comes."""
        self._requests.put(None)
        return [pb.ModelStreamInferResponse.FromString(each) for each in self.call]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self.call.cancel()
        self._channel.close()


def test_calls_reach_the_replicas_in_turn_and_answers_come_back_whole(router: Routed):
    with Client(router.address) as client:
        for _ in range(4):
            np.testing.assert_array_equal(client.infer("echo", X)["x"], X["x"])
        assert router.asked() == [2, 2]
        assert client.ready()
        assert client.ready("echo")
        assert client.metadata("echo").versions == ("1", "2")
        with pytest.raises(ServingError, match="no model") as found:
            client.infer("none", X)
        assert found.value.code is ServingCode.NOT_FOUND
        assert router.run(refuses(router, client)) == ServingCode.UNAVAILABLE
    assert router.metric('fornax_router_requests_total{code="NOT_FOUND"') == 1


def ids(outcome: Any) -> list[Any]:
    return [value for key, value in outcome.trailing_metadata() if key == "x-request-id"]


def test_client_router_and_replica_know_a_call_by_one_id(router: Routed):
    infer = METHODS["ModelInfer"].path
    good, bad = (infer_message(name, X).SerializeToString() for name in ("echo", "nobody"))
    with grpc.insecure_channel(router.address) as channel:
        for data, code in ((good, grpc.StatusCode.OK), (bad, grpc.StatusCode.NOT_FOUND)):
            metadata = (("x-request-id", "mine"),)
            outcome = channel.unary_unary(infer).future(data, metadata=metadata)
            assert outcome.code() is code
            assert ids(outcome) == ["mine"]
        outcome = channel.unary_unary(infer).future(good)
        assert outcome.code() is grpc.StatusCode.OK
        [made] = ids(outcome)
        outcome = channel.unary_unary(METHODS["ServerLive"].path).future(b"")
        assert outcome.code() is grpc.StatusCode.OK
        assert len(ids(outcome)) == 1
    seen = [each.request_id for upstream in router.upstreams for each in upstream.host.requests]
    assert set(seen) >= {"mine", made}
    with Stream(router.address) as stream:
        stream.send("echo")
        assert not stream.read().error_message
        assert stream.end() == []
        [made] = ids(stream.call)
    seen = [each.request_id for upstream in router.upstreams for each in upstream.host.requests]
    assert made in seen


@pytest.mark.parametrize("tls", [False, True])
def test_a_replica_answers_its_router_alone(tls: bool):
    router, other = Routed(tls=tls), Credentials.make(tls=True)
    replica, known = router.upstreams[0], router.credentials
    options = [("grpc.ssl_target_name_override", HOST_NAME)]

    def ask(shown: Credentials, roots: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
        channel = grpc.insecure_channel(replica.address)
        if roots:
            pair = (shown.key.encode(), shown.certificate.encode()) if shown.key else (None, None)
            secure = grpc.ssl_channel_credentials(roots.encode(), *pair)
            channel = grpc.secure_channel(replica.address, secure, options)
        with channel:
            message = infer_message("echo", X).SerializeToString()
            call = channel.unary_unary(METHODS["ModelInfer"].path)
            health = health_pb2_grpc.HealthStub(channel)
            try:
                call(message, metadata=metadata, timeout=SECONDS)
                health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    with pytest.raises(grpc.RpcError, match="the router of its launch alone"):
                        health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
                return error.code()
        return grpc.StatusCode.OK

    try:
        with Client(router.address) as client, Stream(router.address) as stream:
            np.testing.assert_array_equal(client.infer("echo", X)["x"], X["x"])
            for number in range(8):
                stream.send("echo", str(number))
            assert [stream.read().infer_response.id for _ in range(8)] == list("01234567")
        before, token = router.asked(), (TOKEN_HEADER, known.token)
        roots = known.certificate
        for metadata in ((), ((TOKEN_HEADER, "guess"),)):
            assert ask(known, roots, *metadata) is grpc.StatusCode.UNAUTHENTICATED
        if tls:
            for stranger in (other, Credentials(token="")):
                assert ask(stranger, roots, token) is grpc.StatusCode.UNAVAILABLE
            assert ask(known, other.certificate, token) is grpc.StatusCode.UNAVAILABLE
            assert ask(known, "", token) is grpc.StatusCode.UNAVAILABLE
        assert router.asked() == before
        assert ask(known, roots, token) is grpc.StatusCode.OK
    finally:
        router.close()


async def refuses(router: Routed, client: Client) -> ServingCode:
    """What a client gets when no replica is ready."""
    for each in router.pool.replicas.values():
        router.pool.enter(each, "ended")
    try:
        await asyncio.to_thread(client.infer, "echo", X)
    except ServingError as error:
        return error.code
    raise AssertionError("it was answered")


@pytest.mark.slow
def test_a_call_whose_replica_dies_goes_to_another_and_one_that_all_refuse_does_not(
    router: Routed,
):
    with Client(router.address, timeout=SECONDS) as client:
        found: list[Any] = []
        seconds = {"seconds": 600.0}
        call = threading.Thread(
            target=lambda: found.append(client.infer("slow", X, parameters=seconds))
        )
        call.start()
        wait(lambda: router.asked() == [1, 0])
        break_off(router.upstreams[0])
        wait(lambda: router.asked() == [1, 1])
        other = router.upstreams[1]
        other.loop.call_soon_threadsafe(other.host.answer_slow)
        call.join(SECONDS)
        np.testing.assert_array_equal(found[0]["x"], X["x"])
        assert router.asked() == [1, 1]
        assert router.pool.replicas[0].phase == "unready"
        assert router.metric('fornax_router_retries_total{reason="broken"}') == 1
        assert router.metric('fornax_router_requests_total{code="OK",replica="1"}') == 1
        router.upstreams[1].server._inference.stopping = True
        with pytest.raises(ServingError, match="the server is stopping") as refused:
            client.infer("echo", X)
        assert refused.value.code is ServingCode.UNAVAILABLE
        assert router.metric('fornax_router_retries_total{reason="refused"}') == 1


def test_a_call_ends_in_its_replica_when_its_client_leaves_or_its_time_is_over(router: Routed):
    for seconds in (0.5, 5.0, 50.0):  # to a busy replica a call may come too late
        with Client(router.address, timeout=seconds) as client, pytest.raises(ServingError) as late:
            client.infer("slow", X, parameters={"seconds": 600.0})
        assert late.value.code is ServingCode.DEADLINE_EXCEEDED
        if sum(router.asked()):
            break
    wait(lambda: sum(each.host.cancelled for each in router.upstreams) == 1)
    wait(lambda: not any(each.running for each in router.pool.replicas.values()))


def test_changes_reach_all_replicas_and_those_that_come_later(router: Routed):
    late = Served()
    try:
        with Client(router.address) as client:
            client.load("new", "7")
            client.unload("echo")
            assert all(("new", "7") in each.host.loaded for each in router.upstreams)
            with pytest.raises(ServingError, match="no folder of that name"):
                client.load("missing")
        router.run(router.changes.admit(router.add(2, late)))
        assert ("new", "7") in late.host.loaded
        assert ("echo", "1") not in late.host.loaded
    finally:
        late.close()


def test_tokens_are_checked_by_the_router_before_a_replica_is_asked():
    auth, admin = Auth(tokens=("user", "boss")), Auth(tokens=("boss",))
    router = Routed(front={"auth": auth, "admin": admin}, auth=auth, admin=admin)
    try:
        with Client(router.address) as stranger:
            assert stranger.ready()
            with pytest.raises(ServingError, match="needs a token"):
                stranger.infer("echo", X)
        assert router.asked() == [0, 0]
        with Client(router.address, token="user") as user:
            assert user.infer("echo", X)["x"].shape == (2, 4)
            with pytest.raises(ServingError, match="needs a token"):
                user.load("new")
        with Client(router.address, token="boss") as boss:
            boss.load("new")
    finally:
        router.close()


def test_health_is_the_routers_for_the_server_and_a_replicas_for_a_model(router: Routed):
    with grpc.insecure_channel(router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def check(name: str) -> int:
            return stub.Check(health_pb2.HealthCheckRequest(service=name)).status

        assert [check(""), check("echo")] == [1, 1]
        with pytest.raises(grpc.RpcError) as found:
            check("none")
        assert found.value.code() is grpc.StatusCode.NOT_FOUND  # pyrefly: ignore
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watch).status == 1
        router.run(leave(router))
        assert next(watch).status == 2
        watch.cancel()


async def leave(router: Routed) -> None:
    """No replica is ready any more."""
    for each in router.pool.replicas.values():
        router.pool.enter(each, "starting")


def test_a_stream_moves_to_another_replica_between_requests(router: Routed):
    with Stream(router.address) as stream:
        for number in range(4):
            stream.send("echo", str(number))
            answer = stream.read().infer_response
            assert answer.id == str(number)
            np.testing.assert_array_equal(outputs_of(answer)["x"], X["x"])
        assert router.asked() == [2, 2]
        wait(lambda: not any(each.running for each in router.pool.replicas.values()))
        break_off(router.upstreams[0])  # nothing is left to send, and nobody notices
        for number in range(4):
            stream.send("echo", str(number))
            assert stream.read().infer_response.id == str(number)
        assert stream.end() == []
    assert router.metric("fornax_router_cut_responses_total") == 0


def test_requests_of_a_stream_that_a_replica_did_not_answer_go_to_another_once(router: Routed):
    with Stream(router.address) as stream:
        stream.send("echo", "a")
        stream.send("slow", "b", parameters={"seconds": 600.0})
        stream.send("echo", "c")
        assert stream.read().infer_response.id == "a"
        wait(lambda: sum(router.asked()) == 3)
        # Not always the one that answered "a": that had nothing left to send if "b" came late.
        [first] = [n for n, each in router.pool.replicas.items() if each.running]
        before = router.asked()
        before[1 - first] += 2
        break_off(router.upstreams[first])
        wait(lambda: router.asked() == before)
        other = router.upstreams[1 - first]
        other.loop.call_soon_threadsafe(other.host.answer_slow)
        assert [stream.read().infer_response.id for _ in range(2)] == ["b", "c"]
        assert stream.end() == []
        assert router.asked() == before


def test_a_draining_replica_answers_what_it_has_of_a_stream_and_the_rest_goes_on(router: Routed):
    with Stream(router.address) as stream:
        stream.send("slow", "a", parameters={"seconds": 1.0})
        wait(lambda: sum(router.asked()) == 1)
        first = router.asked().index(1)
        replica = router.pool.replicas[first]
        router.run(drain(router, replica))
        stream.send("echo", "b")
        assert [stream.read().infer_response.id for _ in range(2)] == ["a", "b"]
        assert replica.running == 0
        assert router.asked() == [1, 1]
        assert stream.end() == []


async def drain(router: Routed, replica: Replica) -> None:
    router.pool.enter(replica, "draining")


def test_an_answer_that_began_is_never_begun_anew(router: Routed):
    with Stream(router.address) as stream:
        words = np.array([b"one two wait"], object)
        stream.send("talk", "t", text_input=words, stream=np.array([True]))
        assert [text_of(stream.read()) for _ in range(2)] == [b"one", b"two"]
        [first] = [n for n, each in router.pool.replicas.items() if each.running]
        break_off(router.upstreams[first])
        with pytest.raises(grpc.RpcError) as found:
            stream.read()
    assert found.value.code() is grpc.StatusCode.UNAVAILABLE  # pyrefly: ignore
    assert f"replica {first} ended while it answered" in found.value.details()  # pyrefly: ignore
    assert router.metric("fornax_router_cut_responses_total") == 1


def text_of(answer: Any) -> bytes:
    return outputs_of(answer.infer_response)["text_output"][0]


def test_a_stopping_router_answers_what_it_read(router: Routed):
    with Stream(router.address) as stream:
        stream.send("slow", "a", parameters={"seconds": 1.0})
        wait(lambda: sum(router.asked()) == 1)
        stop = asyncio.run_coroutine_threadsafe(
            router.proxy.stop(SECONDS), router.upstreams[0].loop
        )
        assert stream.read().infer_response.id == "a"
        with pytest.raises(grpc.RpcError) as found:
            stream.read()
        assert "the server is stopping" in found.value.details()  # pyrefly: ignore
        stop.result(SECONDS)


def wait(what: Any) -> None:
    """Until something holds."""
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)
