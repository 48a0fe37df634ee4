"""Names and links that lead out of the repository, asked of a running `fornax host`."""

import json
import os
import shutil
import socket

import httpx
import pytest
from tests.integration.serving.storm import http

from fornax.config import ServingCode, ServingError
from fornax.serving.grpc.client import Client

pytestmark = pytest.mark.slow

_NAMES = ["../outside", "..", ".", "/etc", "ranker/../../outside", "a\0b", "x" * 5000, "\n", "%2e"]
_IN_PATHS = [
    "..%2foutside", "%2e%2e%2foutside", "%2e%2e", "..%5coutside", "%2fetc", "ranker%2f..%2f..",
    "ranker%00", "%00", "%0d%0ax:%20y", "%ff%fe", "%25%32%65", "link", "..", ".", "x" * 5000,
]  # fmt: skip
_KEYS = ["../etc/passwd", "/../etc/passwd", "a/b", "//a", "/", "", ".", "..", "a\0b", "x" * 300]


def _outcome(call, *words):
    with pytest.raises(ServingError) as refused:
        call(*words)
    return refused.value.code


def test_no_name_and_no_link_leads_out_of_the_repository(start, repository, bundles, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(bundles / "ranker", outside)
    secret = tmp_path / "secret.yaml"
    secret.write_text("a secret: that no answer shows\n")
    (repository / "link").symlink_to(outside)
    for name in ("linked", "settings", "pinned", "piped"):
        shutil.copytree(bundles / "ranker" / "1", repository / name / "1")
    shutil.rmtree(repository / "linked" / "1")
    (repository / "linked" / "1").symlink_to(outside / "1")
    (repository / "settings" / "serving.yaml").symlink_to(secret)
    (repository / "pinned" / "pin.json").symlink_to(secret)
    os.mkfifo(repository / "piped" / "serving.yaml")
    for number, name in enumerate(["manifest.json", "functions/predict.cpu.mlir"], 2):
        version = repository / "ranker" / str(number)
        shutil.copytree(bundles / "ranker" / "2", version)
        (version / name).unlink()
        (version / name).symlink_to(outside / "2" / name)

    server = start(repository, "--poll-seconds", "0.1", wait=r"ready after [\d.]+ s")
    url = f"http://{server.address('http')}"
    seen = []
    with httpx.Client(base_url=url, timeout=30) as client:
        index = {
            (each["name"], each.get("version", "")): (each["state"], each["reason"])
            for each in client.post("/v2/repository/index").json()
        }
        assert index["ranker", "1"][0] == "READY"
        ready = {name for (name, _), (state, _) in index.items() if state == "READY"}
        assert ready == {"ranker"}
        for name in ("link", "linked", "settings", "pinned", "piped"):
            assert client.get(f"/v2/models/{name}/ready").status_code != 200
            for what in ("load", "rollback"):
                answer = client.post(f"/v2/repository/models/{name}/{what}")
                assert 400 <= answer.status_code < 500, answer.text
                seen.append(answer.text)
        for name in _IN_PATHS:
            routes = [f"/v2/models/{name}/infer", f"/v2/models/ranker/versions/{name}/infer"]
            routes += [f"/v2/repository/models/{name}/{what}" for what in ("load", "rollback")]
            for route in routes:
                seen.append(_raw(server.address("http"), route))
        for key in _KEYS:
            body = {"key": key, "offset": 0, "byte_size": 8}
            answer = client.post("/v2/systemsharedmemory/region/r/register", json=body)
            assert answer.status_code == 400, (key, answer.text)
    with Client(server.address("grpc")) as client:
        for name in _NAMES:
            refusals = {ServingCode.NOT_FOUND, ServingCode.INVALID_ARGUMENT}
            assert _outcome(client.load, name) in refusals, name
            assert _outcome(client.unload, name) in refusals
            assert _outcome(client.metadata, name) in refusals
            assert _outcome(client.infer, name, {}) in refusals
            assert _outcome(client.metadata, "ranker", name) in refusals
        for key in _KEYS:
            fields = {"name": "r", "key": key, "offset": 0, "byte_size": 8}
            code = _outcome(lambda f=fields: client.call("SystemSharedMemoryRegister", **f))
            assert code is ServingCode.INVALID_ARGUMENT
    assert "a secret" not in json.dumps([*seen, *map(list, index.values())])
    assert "a secret" not in (log := server.log.read_text())
    assert "Traceback" not in log
    assert secret.read_text().startswith("a secret")
    assert not list(outside.glob("pin*"))
    assert server.stop() == 0


def _raw(address: str, route: str) -> str:
    """What a path gets that no client would send as it is: 4xx, and never 200."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(http.request("POST", route, b"{}", {"Connection": "close"}))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 4"), (route[:100], answer[:200])
    return answer.decode("latin-1")
