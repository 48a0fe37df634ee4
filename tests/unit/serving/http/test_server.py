"""The server's own life: addresses, certificates, an orderly end."""

import asyncio
import contextlib
import dataclasses
import http.client
import socket
import ssl
import time

import orjson
import pytest
from tests.unit.serving.certificate import certify
from tests.unit.serving.http.conftest import PATIENT
from tests.unit.serving.http.fake import FakeHost

from fornax.config.http_server import HttpServer
from fornax.serving.access import Tls
from fornax.serving.config import Address
from fornax.serving.http import http_app, http_server

X = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
BODY = orjson.dumps({"inputs": [X]})


def _server(host: FakeHost, tls: Tls | None = None, address: Address | None = None) -> HttpServer:
    limits = dataclasses.replace(PATIENT, keep_alive=60.0)
    return http_server(
        http_app(host, limits=limits), address or Address("127.0.0.1", 0), limits, tls
    )


def _ask(address: Address, context: ssl.SSLContext | None, model: str = "echo") -> int:
    if context is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=120)
    else:
        connection = http.client.HTTPSConnection(
            address.host, address.port, timeout=120, context=context
        )
    try:
        connection.request("POST", f"/v2/models/{model}/infer", BODY)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_tls_with_certificates_of_one_side_and_of_both(tmp_path):
    tls = certify(tmp_path)

    async def run() -> None:
        server = _server(FakeHost(), tls)
        address = Address(*await server.start())
        trusting = ssl.create_default_context(cafile=str(tls.cert))
        assert await asyncio.to_thread(_ask, address, trusting) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(_ask, address, ssl.create_default_context())
        await server.stop()

        strict = _server(FakeHost(), dataclasses.replace(tls, client_ca=tls.cert))
        address = Address(*await strict.start())
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(_ask, address, trusting)
        trusting.load_cert_chain(tls.cert, tls.key)
        assert await asyncio.to_thread(_ask, address, trusting) == 200
        await strict.stop()

    asyncio.run(run())


def test_what_cannot_be_listened_on_is_an_error(tmp_path):
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = Address("127.0.0.1", taken.getsockname()[1])
            with pytest.raises(OSError, match="in use"):
                await _server(FakeHost(), address=address).start()
        missing = Tls(cert=tmp_path / "no.pem", key=tmp_path / "no.key")
        server = _server(FakeHost(), missing)
        with pytest.raises(OSError, match="No such file"):
            await server.start()
        await server.stop()

    asyncio.run(run())


def test_stopping_answers_what_runs_and_ends_idle_connections():
    async def run() -> tuple[int, bytes]:
        host = FakeHost()
        server = _server(host)
        address = Address(*await server.start())
        idle, end = await asyncio.open_connection(address.host, address.port)
        asked = asyncio.create_task(asyncio.to_thread(_ask, address, None, "slow"))
        while host.slow is None:
            await asyncio.sleep(0.005)
        stopping = asyncio.create_task(server.stop(120.0))
        await asyncio.sleep(0.15)
        assert not stopping.done()
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection(address.host, address.port)
        echo = await host.answer_slow()
        status, rest = await asked, await idle.read()
        await stopping
        end.close()
        assert echo is host.slow
        return status, rest

    assert asyncio.run(run()) == (200, b"")


def test_what_outlasts_the_drain_gets_503():
    async def run() -> int:
        host = FakeHost()
        server = _server(host)
        address = Address(*await server.start())
        asked = asyncio.create_task(asyncio.to_thread(_ask, address, None, "slow"))
        while host.slow is None:
            await asyncio.sleep(0.005)
        await server.stop(0.0)
        assert host.slow.cancelled()
        return await asked

    assert asyncio.run(run()) == 503


async def _started(**changes: float) -> tuple[HttpServer, Address]:
    limits = dataclasses.replace(PATIENT, **changes)
    server = http_server(http_app(FakeHost(), limits=limits), Address("127.0.0.1", 0), limits)
    return server, Address(*await server.start())


@pytest.mark.parametrize("first", [b"", b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_blank_lines_do_not_keep_a_connection(first):
    async def run() -> None:
        server, address = await _started(keep_alive=0.2, header_timeout=0.2)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for each in (first, b"\r\n", b"\r\n"):
            writer.write(each)
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):  # it ended before a line came
            await asyncio.wait_for(reader.read(), 120)  # to its end
        writer.close()
        await server.stop()

    asyncio.run(run())


def test_a_client_is_not_late_when_the_loop_is():
    async def run(seconds: float) -> bool:
        server, address = await _started(keep_alive=60.0, header_timeout=seconds)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for _ in range(20):  # turns of the loop, in which the server accepts
            await asyncio.sleep(0)
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(2 * seconds)  # the head is there, and nobody read it
        head = await asyncio.wait_for(reader.read(65536), 120)
        writer.close()
        await server.stop()
        return b" 200 OK" in head

    # A busy machine may need more before the head is there.
    assert asyncio.run(run(0.5)) or asyncio.run(run(5.0))


def test_a_client_is_not_late_with_what_is_not_read_yet():
    half = f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n"

    async def run(seconds: float) -> bool:
        host = FakeHost()
        limits = dataclasses.replace(PATIENT, header_timeout=seconds)
        server = http_server(http_app(host, limits=limits), Address("127.0.0.1", 0), limits)
        address = Address(*await server.start())
        reader, writer = await asyncio.open_connection(address.host, address.port)
        slow = half.replace("echo", "slow").encode() + b"\r\n" + BODY
        writer.write(slow + half.encode() + b"\r\n" + BODY + half.encode())
        await asyncio.sleep(3 * seconds)
        while host.slow is None and not reader.at_eof():
            await asyncio.sleep(0.001)
        answered = host.slow is not None
        if answered:
            writer.write(b"\r\n" + BODY)
            await host.answer_slow()
        for _ in range(3 * answered):
            assert b" 200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
        writer.close()
        await server.stop()
        return answered

    # A busy machine may need more before the first head is there.
    assert asyncio.run(run(0.1)) or asyncio.run(run(5.0))
