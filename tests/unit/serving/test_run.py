"""The server's life in this process: what it refuses to start with, how it drains and ends."""

import asyncio
import socket

import httpx
import numpy as np
import pytest

from fornax.config import ConfigError
from fornax.serving import HostConfig, HostServer


class Entry:
    """A model that answers when it is told to."""

    memory, platform = 0, "test"

    def __init__(self, name, folder, settings):
        self.name = name
        self.settings = settings
        self.go = asyncio.Event()
        self.running = asyncio.Event()
        self.stopped_with = None
        self.up = False

    async def start(self):
        if "fails" in self.settings:
            raise ConfigError(self.settings["fails"])
        self.up = True

    async def stop(self, drain_seconds):
        self.up, self.stopped_with = False, drain_seconds

    def ready(self):
        return self.up

    def reason(self):
        return ""

    def inputs(self):
        return {"x": ("FP32", (-1,))}

    outputs = inputs

    def config(self):
        return {"name": self.name}

    def collect(self):
        return []

    def routes(self):
        return {"/v1": self.app}

    async def app(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def infer(self, request):
        self.running.set()
        await self.go.wait()
        return {"x": np.asarray(request.inputs["x"])}


BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def _repository(tmp_path, **backends):
    for name, line in backends.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "serving.yaml").write_text(f"type: test\n{line}")
    return tmp_path


def _config(root, **changes):
    fields = {"http": 0, "grpc": "none", "drain_seconds": 5.0, "log_level": "error", **changes}
    return HostConfig(repository=root, **fields)


async def _run(config, during):
    """Start a server, do something, and return what `run` returns."""
    server = HostServer(config, {"test": Entry})
    try:
        await server.listen()
        running = asyncio.ensure_future(server.run())
        async with httpx.AsyncClient(
            base_url=f"http://{server.addresses['http']}", timeout=120
        ) as client:
            await during(server, client)
        if not server.stopping:
            server.stop()
        return await running
    finally:
        await server.close()


async def _ready(client):
    while (await client.get("/v2/health/ready")).status_code != 200:
        await asyncio.sleep(0.005)


def test_a_stop_answers_what_runs_and_exits_0(tmp_path):
    async def during(server, client):
        await _ready(client)
        backend = server.host.backends["lm"]
        asked = asyncio.ensure_future(client.post("/v2/models/lm/infer", json=BODY))
        await backend.running.wait()
        server.stop()
        while server.host.ready():
            await asyncio.sleep(0.005)
        assert not asked.done()
        backend.go.set()
        answer = await asked
        assert answer.status_code == 200
        assert answer.json()["outputs"][0]["data"] == [1.0, 2.0]
        while backend.stopped_with is None:
            await asyncio.sleep(0.005)
        assert backend.stopped_with <= 5.0

    assert asyncio.run(_run(_config(_repository(tmp_path, lm="")), during)) == 0


def test_a_second_stop_ends_at_once_with_1(tmp_path):
    async def during(server, client):
        await _ready(client)
        asked = asyncio.ensure_future(client.post("/v2/models/lm/infer", json=BODY))
        await server.host.backends["lm"].running.wait()
        server.stop()
        server.stop()
        server.host.backends["lm"].go.set()
        await asyncio.wait([asked])

    assert asyncio.run(_run(_config(_repository(tmp_path, lm="")), during)) == 1


def test_an_entrys_routes_metrics_and_statistics_stand_beside_v2(tmp_path):
    async def during(server, client):
        await _ready(client)
        server.host.backends["lm"].go.set()
        assert (await client.get("/v1/models")).text == "/v1/models"
        assert (await client.post("/v2/models/lm/infer", json=BODY)).status_code == 200
        index = (await client.post("/v2/repository/index")).json()
        assert [(each["name"], each["state"]) for each in index] == [("lm", "READY")]
        stats = (await client.get("/v2/models/lm/stats")).json()["model_stats"][0]
        assert stats["inference_count"] == 2
        metrics = (await client.get("/metrics")).text
        assert 'nv_inference_request_success{model="lm",version="1"} 1' in metrics
        refused = await client.post("/v2/profile", json={})
        assert refused.status_code == 409

    assert asyncio.run(_run(_config(_repository(tmp_path, lm="")), during)) == 0


def test_one_that_fails_leaves_the_others_and_the_reason(tmp_path):
    root = _repository(tmp_path, lm="", bad="fails: no memory\n")

    async def during(server, client):
        while server.host.index()[0].state == "LOADING" or not server.host.index()[1].state:
            await asyncio.sleep(0.005)
        server.host.backends["lm"].go.set()
        while not server.host.backends["lm"].up:
            await asyncio.sleep(0.005)
        assert (await client.get("/v2/health/ready")).status_code == 503
        reasons = {each.name: each.reason for each in server.host.index()}
        assert reasons == {"bad": "no memory", "lm": ""}
        assert (await client.post("/v2/models/lm/infer", json=BODY)).status_code == 200

    # Both would answer under /v1, so one of them has other routes here.
    plain = Entry.routes
    Entry.routes = lambda self: plain(self) if self.name == "lm" else {}
    try:
        assert asyncio.run(_run(_config(root), during)) == 0
    finally:
        Entry.routes = plain


def test_two_models_under_one_route_are_refused(tmp_path):
    async def make():
        HostServer(_config(_repository(tmp_path, one="", two="")), {"test": Entry})

    with pytest.raises(ConfigError, match="one and two both answer under /v1"):
        asyncio.run(make())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_address_that_is_taken_is_said(tmp_path, protocol):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def make():
            changes = {"http": "none", "grpc": "none", protocol: port}
            server = HostServer(_config(tmp_path, **changes), {})
            try:
                await server.listen()
            finally:
                await server.close()

        with pytest.raises(ConfigError, match=rf"--{protocol} 127\.0\.0\.1:{port} cannot be"):
            asyncio.run(make())


def test_a_repository_that_is_none_is_said(tmp_path):
    async def make():
        HostServer(_config(tmp_path / "nowhere"), {})

    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        asyncio.run(make())


def test_one_that_will_be_started_is_loading_until_then(tmp_path):
    root = _repository(tmp_path, lm="")

    async def state(**changes):
        server = HostServer(_config(root, grpc="none", **changes), {"test": Entry})
        before = [each.state for each in server.host.index()]
        server.host.backends["lm"].go.set()
        await server.host.start()
        after = [each.state for each in server.host.index()]
        await server.close()
        return before + after

    assert asyncio.run(state()) == ["LOADING", "READY"]
    assert asyncio.run(state(control="explicit")) == ["LOADING", "UNAVAILABLE"]
