"""An hour's worth of faults in a minute: versions come, go and rot, clients vanish, and yet."""

import asyncio
import collections
import contextlib
import functools
import json
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.storm import clients, world
from tests.integration.serving.storm.clients import Storm
from tests.integration.serving.storm.faults import Faults

pytestmark = [pytest.mark.slow, pytest.mark.fault]

_WORDS = ["--poll-seconds", "0.1", "--access-log", "none"]
_CROWD = 4
_MEMORY = 64 * 2**20
"""Bytes that may be held beside what was held before a storm. The versions that a storm loads hold
over a megabyte each, dozens of them in a minute, and its bursts ten megabytes of answers at a time:
if either stayed, it would be seen. What may stay is what the C library's allocator keeps between
its arenas, which is asked to give back all only beyond 32 MiB, and caches of jax that are bounded.
"""
_THREADS = 4
"""Threads beside those before: pools that grow to their bound when several things happen at once.
"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    return world.stock(tmp_path_factory.mktemp("stock"))


def _held(server) -> dict[str, Any]:
    """What a process holds: memory, descriptors by what they are of, threads."""
    process = Path(f"/proc/{server.popen.pid}")
    status = (process / "status").read_text()
    return {
        "memory": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024,
        "files": collections.Counter(_target(path) for path in (process / "fd").iterdir()),
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
    }


def _target(descriptor: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return re.sub(r"\d+", "", str(descriptor.readlink()))
    return "gone"


def _more(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What is held beyond what was held before, and may be."""
    more = {
        "memory": max(0, after["memory"] - before["memory"] - _MEMORY),
        "files": after["files"] - before["files"],
        "threads": max(0, after["threads"] - before["threads"] - _THREADS),
    }
    return {name: value for name, value in more.items() if value}


async def _watch(storm: Storm, rng: random.Random) -> None:
    """Live at all times, ready while all that should be served is, nothing compiled late."""
    paths = ["/v2/health/live", "/v2/models/rank/ready", "/v2/models/multi/ready"]
    for path in [*paths, "/v2/health/ready"]:
        begun, away = time.monotonic(), storm.away
        status, _ = await storm.call("GET", path)
        took = time.monotonic() - begun
        excused = path == "/v2/health/ready" and (away or storm.away)
        if (status != 200 and not excused) or took > 10:
            storm.problem(f"{path}: {status} after {took:.2f} s")
    _, text = await storm.call("GET", "/metrics")
    late = re.search(r"^fornax_compilations_after_ready_total (\S+)$", text, re.MULTILINE)
    if late is None or float(late[1]):
        storm.problem(f"compiled after ready: {late and late[0]}")
    status, report = await storm.call("GET", f"/v2/repository/models/{world.SHADE}/shadow")
    if status == 200:
        _shadowed(storm, report)
    elif status != 409:
        storm.problem(f"the shadow's report: {status} {report}")
    storm.counts["watched"] += 1
    await asyncio.sleep(0.2)


def _shadowed(storm: Storm, report: Any) -> None:
    """A shadow computes other numbers in the same shapes; no copy fails but by a refusal."""
    storm.counts["shadow compared"] += report["requests"]["compared"]
    storm.counts["shadow differing"] += report["requests"]["differing"]
    odd = [each["problems"] for each in report["outputs"].values() if each["problems"]]
    odd += [reason for reason in report["errors"] if len(reason) < 30]
    if odd or report["shadow_version"] != "2" or report["main_version"] == "2":
        storm.problem(f"the shadow's report: {report}")


@contextlib.asynccontextmanager
async def _raging(storm: Storm, faults: Faults) -> AsyncIterator[None]:
    """A storm for as long as the block lasts, and until each part of it has ended."""

    async def binary(storm: Storm, rng: random.Random) -> None:
        await clients.over_http(storm, rng, binary=True)

    async def plain(storm: Storm, rng: random.Random) -> None:
        await clients.over_http(storm, rng, binary=False)

    async def bursts(storm: Storm, rng: random.Random) -> None:
        await asyncio.sleep(rng.random())
        await clients.burst(storm, 10 * 3 * _CROWD)

    crowd = [binary, plain, clients.over_grpc] * _CROWD
    others = [clients.over_stream, clients.vanishing, clients.vanishing, clients.slow]
    others += [clients.wrong, bursts, _watch]
    steps = [functools.partial(step, storm) for step in (*crowd, *others)] + faults.steps
    storm.over = False
    tasks = [
        asyncio.create_task(storm.repeat(f"{number} {storm.life}", step))
        for number, step in enumerate(steps)
    ]
    try:
        yield
    finally:
        storm.over = True
        done, late = await asyncio.wait(tasks, timeout=300)
    assert not late, f"{late} do not end"
    for task in done:
        task.result()


async def _asked(storm: Storm, path: str) -> None:
    status, found = await storm.call("POST", f"/v2/repository/models/{path}", {})
    assert status == 200, (path, status, found)


async def _quiet(storm: Storm, wanted: set[tuple[str, str, str]]) -> None:
    """Wait until the server serves just what is wanted, and a quiet second more."""
    until = time.monotonic() + 240
    while True:
        _, index = await storm.call("POST", "/v2/repository/index", {})
        found = {(each["name"], each.get("version", ""), each["state"]) for each in index}
        if found == wanted:
            break
        assert time.monotonic() < until, index
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)


_ALL = {("rank", "2", "READY")}
_ALL |= {(name, version, "READY") for name in ("multi", "guest", world.SHADE) for version in "12"}


async def _in_order(storm: Storm, faults: Faults) -> None:
    """Put the repository in order, and wait until it is served so."""
    await asyncio.to_thread(world.settle, faults.root, faults.stock)
    for name in ("rank", "multi", world.SHADE):
        await _asked(storm, f"{name}/release")
    for name in world.MODELS:
        await _asked(storm, f"{name}/load")
    await _quiet(storm, _ALL)


async def _killed(storm: Storm, faults: Faults, server) -> set[str]:
    """Kill the server within a deployment and a rollback; at which versions it may be held then.

    At 2, by the rollback that was answered; at 1 only if the one that was not had come so far.
    """
    rng = storm.rng("kill")
    await asyncio.to_thread(world.deploy, faults.stock / "rank/3", faults.root / "rank/3")
    await _quiet(storm, _ALL - {("rank", "2", "READY")} | {("rank", "3", "READY")})
    await _asked(storm, "rank/rollback")
    deploys = [
        asyncio.to_thread(world.deploy, faults.stock / model / "3", faults.root / model / "3")
        for model in ("multi", "guest")
    ]
    rollback = storm.call(
        "POST", "/v2/repository/models/rank/rollback", {"parameters": {"version": "1"}}
    )
    under_way = asyncio.gather(*deploys, rollback, return_exceptions=True)
    await asyncio.sleep(rng.random() * 0.3)
    storm.life += 1
    server.popen.send_signal(signal.SIGKILL)
    await asyncio.to_thread(server.popen.wait)
    *_, last = await under_way
    if isinstance(last, tuple) and last[0] == 200:
        return {"1"}
    return {"1", "2"}


async def _restarted(storm: Storm, faults: Faults, start, may_be: set[str]):
    """A server over what a killed one left: whole, and held where it was."""
    pin = json.loads((faults.root / "rank/pin.json").read_text())["version"]
    assert pin in may_be
    server = await asyncio.to_thread(start, faults.root, *_WORDS, devices=world.DEVICES)
    storm.http, storm.grpc = server.address("http"), server.address("grpc")
    wanted = {("rank", pin, "READY"), ("rank", "3", "UNAVAILABLE")}
    wanted |= {("rank", "2", "UNAVAILABLE")} if pin == "1" else set()
    wanted |= {("multi", version, "READY") for version in "23"}
    wanted |= {("multi", "1", "READY")}
    wanted |= {("guest", version, "READY") for version in "123"}
    wanted |= {(world.SHADE, version, "READY") for version in "12"}
    await _quiet(storm, wanted)
    return server


async def _storm(seconds: float, seed: int, start, root: Path, stock: Path) -> None:
    storm = Storm(seed)
    faults = Faults(storm, root, stock)
    world.settle(root, stock)
    first = await asyncio.to_thread(start, root, *_WORDS, devices=world.DEVICES)
    storm.http, storm.grpc = first.address("http"), first.address("grpc")
    may_be = await _killed(storm, faults, first)
    server = await _restarted(storm, faults, start, may_be)
    async with _raging(storm, faults):
        await asyncio.sleep(seconds / 3)
    await _in_order(storm, faults)
    before = _held(server)
    storm.life += 1
    async with _raging(storm, faults):
        await asyncio.sleep(seconds * 2 / 3)
    await _in_order(storm, faults)
    if storm.problems:
        pytest.fail("\n".join(storm.problems[:20]))
    until = time.monotonic() + 15  # the allocator is asked to give back every five seconds
    while more := _more(after := _held(server), before):
        assert time.monotonic() < until, (more, before, after)
        await asyncio.sleep(0.2)
    kinds = ["binary 200", "json 200", "grpc 200", "stream 200", "deployed"]
    if seconds >= 60:  # the few bursts of a short one may all be answered, the shadow be seen once
        kinds += ["burst 429", "shadow differing"]
    for kind in kinds:
        assert storm.counts[kind], kind
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text() + first.log.read_text()
    assert not [path for path in root.rglob(".*") if path.name.startswith(".pin")]


def _minute(seed: int):
    return pytest.param(60, seed, id=f"minute-{seed}", marks=pytest.mark.exhaustive)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("seconds", "seed"), [pytest.param(6, 1, id="short"), *map(_minute, (1, 2, 3))]
)
def test_a_storm_of_faults(seconds, seed, stock, start, tmp_path):
    asyncio.run(_storm(seconds, seed, start, tmp_path / "models", stock))
