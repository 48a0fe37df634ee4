"""Many clients at once, some of which leave, ask for nonsense or send bytes that are no HTTP."""

import asyncio
import json
import random
import re

import pytest

STREAMS = 256


async def stream(host, port, rng):
    """One client; what became of it."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        kind = rng.random()
        if kind < 0.1:
            writer.write(rng.randbytes(200) + b"\r\n\r\n")
            await asyncio.wait_for(reader.read(), 30)
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
        answer = await asyncio.wait_for(reader.read(), 60)
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
    """256 clients at a time for some seconds; how many of each kind, and what is left open."""
    rng = random.Random(seed)
    counts, until = {}, asyncio.get_running_loop().time() + seconds

    async def one():
        while asyncio.get_running_loop().time() < until:
            kind = await stream(host, port, rng)
            counts[kind] = counts.get(kind, 0) + 1

    half = []

    async def watch():
        await asyncio.sleep(seconds / 2)
        half.append(await metric(host, port, "process_resident_memory_bytes"))
        half.append(await metric(host, port, "process_open_fds"))

    await asyncio.gather(watch(), *[one() for _ in range(STREAMS)])
    for _ in range(100):
        state = await load(host, port)
        if state == {"server_load": 0, "unfinished": 0}:
            break
        await asyncio.sleep(0.05)
    memory = await metric(host, port, "process_resident_memory_bytes")
    files = await metric(host, port, "process_open_fds")
    return counts, state, memory / half[0], files


@pytest.mark.parametrize(
    "seconds", [pytest.param(6, id="short"), pytest.param(60, id="long", marks=pytest.mark.slow)]
)
def test_256_streams_with_disconnects_and_nonsense_leave_nothing_behind(serve, seconds):
    server = serve(_step_seconds=0.002, _max_num_seqs=64, disable_access_log=True)
    host, port = server.url.removeprefix("http://").split(":")
    counts, state, growth, files = asyncio.run(storm(host, int(port), seconds, seed=1))
    assert state == {"server_load": 0, "unfinished": 0}
    kinds = {"noise", "refused", "left while sending", "left while reading", "whole"}
    assert counts.keys() == kinds
    assert growth < 1.1
    assert files < 64
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log
    assert server.stop() == 0
