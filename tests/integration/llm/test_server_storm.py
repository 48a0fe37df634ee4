"""Many clients at once: some leave, ask for nonsense, or send bytes that are not HTTP."""

import asyncio
import json
import random
import re
import socket
import time

import pytest

STREAMS = 256


async def stream(host, port, rng):
    """One client; what became of it."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        kind = rng.random()
        if kind < 0.1:
            writer.write(rng.randbytes(200) + b"\r\n\r\n")
            await asyncio.wait_for(reader.read(), 300)
            return "noise"
        if kind < 0.25:
            body = rng.choice(
                [b"{", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b'{"prompt": 5}', b"[" * 5000]
            )
        else:
            tokens = rng.randrange(1, 300)
            body = json.dumps(
                {"prompt": "hello world", "max_tokens": tokens, "stream": rng.random() < 0.8}
            ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode())
        if rng.random() < 0.05:
            return "left while sending"
        writer.write(body)
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.3)
            return "left while reading"
        answer = await asyncio.wait_for(reader.read(), 300)
        status = int(answer[9:12])
        if kind < 0.25:
            assert status == 400, answer
            return "refused"
        assert status == 200, answer
        if b"event-stream" in answer:
            assert answer.rstrip(b"\r\n0").endswith(b"data: [DONE]"), answer[-200:]
        return "whole"
    finally:
        writer.close()


async def metric(host, port, name):
    """A metric's value."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return float(re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)[1])


async def load(host, port):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /load HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return json.loads(body)


async def storm(host, port, seconds, seed):
    """256 clients at a time for some seconds; how many of each kind."""
    rng = random.Random(seed)
    counts, until = {}, asyncio.get_running_loop().time() + seconds

    async def one():
        while True:
            kind = await stream(host, port, rng)
            counts[kind] = counts.get(kind, 0) + 1
            if asyncio.get_running_loop().time() > until:
                return

    await asyncio.gather(*[one() for _ in range(STREAMS)])
    return counts


async def settled(host, port):
    """The server's memory when no request and hardly a file is left."""
    async with asyncio.timeout(120):
        while await load(host, port) != {"server_load": 0, "unfinished": 0}:
            await asyncio.sleep(0.05)
        while await metric(host, port, "process_open_fds") >= 64:
            await asyncio.sleep(0.05)
    return await metric(host, port, "process_resident_memory_bytes")


async def storms(host, port, seconds):
    """Two storms, the second like the first; each one's counts and the memory after each."""
    found = [(await storm(host, port, seconds / 2, 1), await settled(host, port)) for _ in range(2)]
    return zip(*found, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(6, id="short"), pytest.param(60, id="long", marks=pytest.mark.exhaustive)],
)
def test_256_streams_with_disconnects_and_nonsense_leave_nothing_behind(serve, seconds):
    server = serve(_step_seconds=0.002, _max_num_seqs=64, disable_access_log=True)
    host, port = server.url.removeprefix("http://").split(":")
    counts, memory = asyncio.run(storms(host, int(port), seconds))
    kinds = {"noise", "refused", "left while sending", "left while reading", "whole"}
    assert [each.keys() for each in counts] == [kinds] * 2
    assert memory[1] < 1.1 * memory[0]
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log
    assert server.stop() == 0


def talk(server, *pieces, seconds=120.0):
    """Send bytes; what comes back until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass
        return answer


@pytest.mark.slow
def test_a_head_without_end_is_431_and_one_that_does_not_come_is_cut_off(serve):
    server = serve(max_header_bytes=4096, header_timeout=3.0)
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    refused = talk(server, head, b"x-long: " + b"a" * 5_000_000)  # more than sockets hold
    assert refused.startswith(b"HTTP/1.1 431")
    error = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 431)
    begun = time.monotonic()
    assert talk(server, head) == b""
    assert talk(server) == b""
    assert time.monotonic() - begun < 100
    whole = talk(server, head + b"x-some: " + b"a" * 3000 + b"\r\nconnection: close\r\n\r\n")
    assert whole.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_more_connections_than_allowed_get_503_until_others_leave(serve):
    server = serve(max_connections=3)
    host, port = server.url.removeprefix("http://").split(":")
    request = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    crowd = [socket.create_connection((host, int(port)), timeout=120) for _ in range(3)]
    refused = talk(server, request)
    assert refused.startswith(b"HTTP/1.1 503")
    error = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "service_unavailable_error"
    for each in crowd:
        each.close()
    until = time.monotonic() + 120
    while not talk(server, request).startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_client_that_takes_nothing_is_cut_off_and_its_sequence_freed(serve):
    server = serve(_step_seconds=0.0, _max_model_len=10**6, send_timeout=1.0)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "hello", "max_tokens": 900_000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        kind = b"content-type: application/json\r\n\r\n"
        connection.sendall(head.encode() + kind + body)
        with server.client() as client:
            until = time.monotonic() + 240
            while client.get("/load").json()["unfinished"] == 0:
                assert time.monotonic() < until
            while client.get("/load").json() != {"server_load": 0, "unfinished": 0}:
                assert time.monotonic() < until
                time.sleep(0.1)


@pytest.mark.slow
def test_under_a_proxys_path_everything_is_where_it_belongs(serve):
    server = serve(root_path="/api", api_key=["secret"])
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=headers).status_code == 200
