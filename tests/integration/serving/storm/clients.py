"""Clients of a storm: steady ones that look at every answer, and those that behave badly."""

import asyncio
import collections
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from tests.integration.serving.storm import http, world

from fornax.serving.grpc.client import infer_message, outputs_of
from fornax.serving.grpc.methods import METHODS

_INFER = METHODS["ModelInfer"]
_STREAM = METHODS["ModelStreamInfer"]
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
_LATE = 30.0
"""Seconds after which a request counts as lost; this machine is shared."""
_BROKEN = (OSError, asyncio.IncompleteReadError)
_MAY = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.CANCELLED: 499,
}


class Storm:
    """What all parts of a storm share: the server as it is now, and what was seen."""

    def __init__(self, seed: int):
        self.seed = seed
        self.http = self.grpc = ""
        self.life = 0
        """Raised when the server is killed, before it is."""
        self.over = False
        self.away = False
        """Whether the guest may be unloaded, so that the server rightly says it is not ready."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def rng(self, name: str) -> random.Random:
        """Numbers for one part."""
        return random.Random(f"{self.seed} {name}")

    def problem(self, text: str) -> None:
        """Remember what should not have happened."""
        self.problems.append(text[:1000])

    async def repeat(self, name: str, step: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Do a step again and again; a broken connection is excused where the server was killed."""
        rng = self.rng(name)
        while not self.over:
            life = self.life
            try:
                async with asyncio.timeout(_LATE * 2):
                    await step(rng)
            except (*_BROKEN, TimeoutError, grpc.aio.AioRpcError, ExceptionGroup) as error:
                if self.life == life:
                    self.problem(f"{name}: {error!r}")
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def connection(self, **options: Any) -> AsyncIterator[http.Connection]:
        """A connection over HTTP."""
        connection = await http.Connection.open(self.http, **options)
        try:
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """A connection over gRPC."""
        async with grpc.aio.insecure_channel(self.grpc, _OPTIONS) as channel:
            yield channel

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One call that is not an inference: status and document."""
        data = b"" if body is None else json.dumps(body).encode()
        async with self.connection() as connection, asyncio.timeout(_LATE):
            status, headers, found = await connection.ask(http.request(method, path, data))
        is_json = headers.get("content-type", "").startswith("application/json")
        return status, json.loads(found) if is_json and found else found.decode()

    def judge(self, kind: str, asked: "Asked", status: int, why: str) -> None:
        """Look at a refusal: whether it may be, and gives its reason."""
        self.counts[f"{kind} {status}"] += 1
        allowed = {429}
        if asked.model == "guest" or asked.version:
            allowed |= {503}
        if asked.version:
            allowed |= {404}
        if status not in allowed or len(why) < 10:
            self.problem(f"{kind} {asked.model}/{asked.version or 'default'}: {status} {why!r}")

    def check(self, kind: str, asked: "Asked", name: str, version: str, id_: str, arrays: Any):
        """Look at an answer."""
        self.counts[f"{kind} 200"] += 1
        wrong = world.fault(asked.function, version, asked.inputs, arrays)
        if name.partition(":")[0] != asked.model or id_ != asked.id:
            wrong = wrong or f"it answers {name} {id_}"
        if asked.version and version != asked.version.replace("first", "1"):
            wrong = wrong or f"version {version} answered for {asked.version}"
        if asked.model == world.SHADE and version == "2" and not asked.version:
            wrong = wrong or "the shadow answered"
        if wrong:
            self.problem(f"{kind} {asked.model}:{asked.function}/{asked.version}: {wrong}")


class Asked:
    """A request that was drawn."""

    def __init__(self, rng: random.Random):
        self.model, self.function, self.inputs = world.draw(rng)
        versions = ["", "", "", "1", "2", "3"]
        self.version = rng.choice(versions + ["first"] * (self.model == "multi"))
        self.id = f"{rng.getrandbits(48):x}"

    def over_http(self, *, binary: bool) -> bytes:
        """As HTTP has it."""
        path = http.path_of(self.model, self.version, self.function)
        return http.encode(path, self.inputs, self.id, binary=binary)

    def over_grpc(self) -> bytes:
        """As gRPC has it."""
        name = f"{self.model}:{self.function}"
        message = infer_message(name, self.inputs, version=self.version, id=self.id)
        return message.SerializeToString()


def _told(storm: Storm, kind: str, asked: Asked, answer: tuple[int, Any, bytes]) -> None:
    status, headers, body = answer
    if status != 200:
        storm.judge(kind, asked, status, json.loads(body)["error"])
        return
    document, arrays = http.decode(headers, body)
    name, version = document["model_name"], document["model_version"]
    storm.check(kind, asked, name, version, document.get("id"), arrays)


async def over_http(storm: Storm, rng: random.Random, *, binary: bool) -> None:
    """A connection with twenty requests, one after another."""
    async with storm.connection() as connection:
        for _ in range(20):
            if storm.over:
                return
            asked = Asked(rng)
            async with asyncio.timeout(_LATE):
                answer = await connection.ask(asked.over_http(binary=binary))
            _told(storm, "binary" if binary else "json", asked, answer)


async def over_grpc(storm: Storm, rng: random.Random) -> None:
    """A channel with sixty requests, three at a time."""
    async with storm.channel() as channel:
        call = channel.unary_unary(_INFER.path)

        async def some() -> None:
            for _ in range(20):
                if storm.over:
                    return
                asked = Asked(rng)
                try:
                    data = await call(asked.over_grpc(), timeout=_LATE)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _MAY or "Socket closed" in (error.details() or ""):
                        raise
                    if error.code() is grpc.StatusCode.UNAVAILABLE and "ipv4:" in error.details():
                        raise
                    storm.judge("grpc", asked, _MAY[error.code()], error.details() or "")
                    continue
                found = _INFER.response.FromString(data)
                names = found.model_name, found.model_version, found.id
                storm.check("grpc", asked, *names, outputs_of(found))

        await asyncio.gather(*(some() for _ in range(3)))


async def over_stream(storm: Storm, rng: random.Random) -> None:
    """A stream of requests, left in the middle half of the time."""
    many = [Asked(rng) for _ in range(12)]
    async with storm.channel() as channel:
        stream = channel.stream_stream(_STREAM.path)()
        for asked in many:
            await stream.write(asked.over_grpc())
        leave = rng.random() < 0.5
        if not leave:
            await stream.done_writing()
        for number, asked in enumerate(many):
            if leave and number == 5:
                stream.cancel()
                storm.counts["stream left"] += 1
                return
            found = _STREAM.response.FromString(await stream.read())
            one = found.infer_response
            if found.error_message:
                text = found.error_message
                status = 429 if "queue" in text or "wait" in text else 503
                storm.judge("stream", asked, status if asked.version == "" else 404, text)
                continue
            storm.check("stream", asked, one.model_name, one.model_version, one.id, outputs_of(one))


async def vanishing(storm: Storm, rng: random.Random) -> None:
    """Leaves within the request, before the answer, or within the answer."""
    asked = Asked(rng)
    kind = rng.choice(["request", "wait", "answer", "call"])
    if kind == "call":
        async with storm.channel() as channel:
            call = channel.unary_unary(_INFER.path)(asked.over_grpc())
            await asyncio.sleep(rng.random() * 0.01)
            call.cancel()
    else:
        connection = await http.Connection.open(storm.http, receive=4096)
        try:
            data = asked.over_http(binary=True)
            cut = rng.randrange(1, len(data)) if kind == "request" else len(data)
            await connection.send(data[:cut])
            await asyncio.sleep(rng.random() * 0.01)
            if kind == "answer":
                await connection.receive_some(100)
        finally:
            connection.reset()
    storm.counts[f"left in {kind}"] += 1
    await asyncio.sleep(rng.random() * 0.05)


async def slow(storm: Storm, rng: random.Random) -> None:
    """Sends or takes slowly, within the limits: it gets its answer, and a right one."""
    asked = Asked(rng)
    asked.model, asked.function = "multi", "wide"
    asked.inputs = {"x": world.numbers(rng, (world.BATCH + 2, world.WIDE))}
    writer = rng.random() < 0.5
    async with storm.connection(receive=4096) as connection, asyncio.timeout(_LATE):
        data = asked.over_http(binary=rng.random() < 0.5)
        await connection.send(data, pieces=10 if writer else 1, pause=0.03 if writer else 0.0)
        answer = await connection.receive(pause=0.0 if writer else 0.02)
        _told(storm, "slow writer" if writer else "slow reader", asked, answer)


async def wrong(storm: Storm, rng: random.Random) -> None:
    """Sends what is refused."""
    if rng.random() < 0.3:
        async with storm.channel() as channel:
            call = channel.unary_unary(_INFER.path)
            message = infer_message("rank", {"ids": world.numbers(rng, (1, 2))})
            message.raw_input_contents.append(b"x" * rng.randrange(20))
            data = rng.choice([message.SerializeToString(), rng.randbytes(50)])
            try:
                await call(data, timeout=_LATE)
            except grpc.aio.AioRpcError as error:
                codes = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
                if error.code() not in codes:
                    raise
                storm.counts["wrong call refused"] += 1
            else:
                storm.problem(f"a wrong call was answered: {data!r}")
        return
    data = http.nonsense(rng)
    async with storm.connection() as connection, asyncio.timeout(_LATE):
        status, _, body = await connection.ask(data)
    storm.counts[f"wrong {status}"] += 1
    if not 400 <= status < 500 or len(json.loads(body)["error"]) < 10:
        storm.problem(f"nonsense got {status} {body[:200]!r}: {data[:300]!r}")


async def burst(storm: Storm, clients: int) -> None:
    """Many at once, each with one request: answered or refused."""
    storm.counts["bursts"] += 1
    rng = storm.rng(f"burst {storm.counts['bursts']}")
    many = [Asked(rng) for _ in range(clients)]
    connected = asyncio.Barrier(clients)

    async def one(asked: Asked) -> None:
        data = asked.over_http(binary=True)
        async with storm.connection() as connection, asyncio.timeout(_LATE):
            await connected.wait()
            answer = await connection.ask(data)
        _told(storm, "burst", asked, answer)

    async with asyncio.TaskGroup() as group:
        for asked in many:
            group.create_task(one(asked))
