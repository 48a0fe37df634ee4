"""`fornax host` and its commands to a running server: what they send, print, and refuse."""

import json
import re
import socket
import threading
import time

import pytest
from tests.unit.bench.v2.fake import running

from fornax.cli.main import main as fornax
from fornax.serving.types import WAITING

STATS = {
    "name": "ranker",
    "version": "2",
    "inference_count": 30,
    "execution_count": 10,
    "inference_stats": {
        "success": {"count": 20, "ns": 20_000_000},
        "fail": {"count": 3, "ns": 1},
        "queue": {"count": 20, "ns": 4_000_000},
    },
}
SHADOW = {
    "name": "ranker",
    "running": True,
    "main_version": "1",
    "shadow_version": "2",
    "share": 0.5,
    "requests": {"seen": 2000, "copied": 1000},
    "errors": {"no memory": 4},
    "outputs": {
        "predict/score": {
            "compared": 996,
            "differing": 7,
            "max_absolute": 0.25,
            "max_relative": 0.5,
            "problems": {"another shape": 1},
        }
    },
    "worst": [{"max_absolute": 0.25, "output": "predict/score", "id": "r-9"}],
    "latency": {"main": {"mean_us": 200.0}, "shadow": {"mean_us": 300.0}},
}
INDEX = [
    {"name": "ranker", "version": "2", "state": "READY", "reason": ""},
    {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "altered"},
]
MODELS = "/v2/repository/models"
ANSWERS = {
    "/v2/repository/index": INDEX,
    "/v2/models/stats": {"model_stats": [STATS]},
    f"{MODELS}/ranker/load": {},
    f"{MODELS}/ranker/unload": {},
    f"{MODELS}/ranker/release": {},
    f"{MODELS}/ranker/rollback": {"name": "ranker", "version": "1", "previous": "2"},
    f"{MODELS}/ranker/shadow": SHADOW,
    "/v2/profile": {"directory": "profiles/x", "running": True},
}


class Fake:
    """Answers the operators' calls, and keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.ready_after = 0
        self.indices = []
        """What the index says before it says INDEX."""

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        path, headers = scope["path"], dict(scope["headers"])
        sent = json.loads(body) if body else None
        self.asked.append((scope["method"], path, sent, headers.get(b"authorization")))
        if path == "/v2/health/ready":
            self.ready_after -= 1
            status, answer = (200 if self.ready_after < 0 else 503), {}
        else:
            status = 200 if path in ANSWERS else 404
            answer = ANSWERS.get(path, {"error": "there is no such model"})
            if path == "/v2/repository/index" and self.indices:
                answer = self.indices.pop(0)
        content = json.dumps(answer).encode()
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module")
def listening():
    fake = Fake()
    with running(fake) as address:
        yield fake, address


@pytest.fixture
def server(listening, monkeypatch):
    fake, address = listening
    monkeypatch.delenv("FORNAX_HOST_TOKEN", raising=False)
    fake.asked, fake.ready_after, fake.indices = [], 0, []
    return fake, address


def _say(capsys, server, *words):
    code = fornax(["host", *words, "--url", server[1]])
    return code, capsys.readouterr()


def test_status_has_a_line_a_version_and_says_why_not(server, capsys):
    code, said = _say(capsys, server, "status")
    assert code == 0
    lines = said.out.splitlines()
    assert lines[0] == f"{server[1]} is live and ready"
    assert lines[2].split() == ["ranker", "2", "READY", "20", "3", "3.0", "200", "1,000"]
    assert lines[3].split() == ["broken", "1", "UNAVAILABLE", "altered"]


def test_status_is_1_while_it_is_not_ready_and_can_wait(server, capsys):
    server[0].ready_after = 2
    assert _say(capsys, server, "status")[0] == 1
    assert _say(capsys, server, "status", "--wait", "5", "--json")[0] == 0
    assert server[0].ready_after < 0


def _line(name, version, state, reason=""):
    return {"name": name, "version": version, "state": state, "reason": reason}


def test_waiting_ends_when_what_is_lacking_has_failed(server, capsys, monkeypatch):
    monkeypatch.setattr("fornax.serving.client._PAUSE", 0.001)
    fake = server[0]
    fake.ready_after = 10**9
    waits = _line("ranker", "2", "UNAVAILABLE", f"{WAITING}: weights/d/0 has 1 of 2 bytes")
    fake.indices = [
        [],
        [_line("broken", "", "LOADING")],
        [waits, _line("broken", "1", "UNAVAILABLE", "altered")],
        [_line("ranker", "2", "READY"), _line("broken", "1", "LOADING")],
        [_line("ranker", "2", "READY")],
        INDEX,
        [_line("ranker", "2", "READY"), _line("broken", "1", "LOADING")],
    ]
    began = time.monotonic()
    code, said = _say(capsys, server, "status", "--wait", "600")
    assert time.monotonic() - began < 300
    assert code == 1
    assert fake.indices == []
    lines = said.out.splitlines()
    assert lines[0] == f"{server[1]} is live and not ready: broken is not served"
    assert lines[3].split() == ["broken", "1", "UNAVAILABLE", "altered"]
    fake.indices = [[_line("ranker", "2", "LOADING")]]
    assert "not ready: ranker is loading" in _say(capsys, server, "status")[1].out


@pytest.mark.parametrize(
    ("words", "path", "body", "out"),
    [
        (["load", "ranker"], "load", {}, "ranker is loaded"),
        (["load", "ranker", "--version", "2"], "load", {"version": "2"}, "ranker 2 is loaded"),
        (["unload", "ranker", "--version", "2"], "unload", {"version": "2"}, "2 is unloaded"),
        (["rollback", "ranker"], "rollback", {}, "version 1 serves in place of 2"),
        (["release", "ranker"], "release", {}, "its version policy chooses"),
    ],
)
def test_a_models_versions_are_changed(server, capsys, words, path, body, out):
    code, said = _say(capsys, server, *words)
    assert code == 0
    assert out in said.out
    expected = {"parameters": body} if body else {}
    assert server[0].asked == [("POST", f"{MODELS}/ranker/{path}", expected, None)]


def test_a_shadows_report_is_a_table(server, capsys):
    code, said = _say(capsys, server, "shadow", "ranker")
    assert code == 0
    assert "version 2 gets 50% of what version 1 answers" in said.out
    assert "seen 2,000, copied 1,000" in said.out
    row = next(line for line in said.out.splitlines() if line.startswith("predict/score"))
    assert row.split()[1:5] == ["996", "7", "0.25", "0.5"]
    assert "4 failed: no memory" in said.out
    assert "furthest off: r-9" in said.out
    assert json.loads(_say(capsys, server, "shadow", "ranker", "--json")[1].out) == SHADOW


def test_a_profile_is_asked_for(server, capsys):
    code, said = _say(capsys, server, "profile", "--seconds", "2")
    assert code == 0
    assert "is being written to profiles/x" in said.out
    assert server[0].asked[-1][2] == {"seconds": 2.0}


def test_the_first_token_of_the_environment_is_sent(server, capsys, monkeypatch):
    monkeypatch.setenv("FORNAX_HOST_TOKEN", "one,two")
    assert _say(capsys, server, "load", "ranker")[0] == 0
    assert server[0].asked[-1][3] == b"Bearer one"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["load", "other"], "there is no such model"),
        (["load"], "no model is named"),
        (["shadow"], "no model is named"),
    ],
)
def test_what_is_refused_is_one_paragraph(server, capsys, words, message):
    code, said = _say(capsys, server, *words)
    assert code == 2
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["host", "status", "--url", "127.0.0.1:9"], "no server answers at 127.0.0.1:9"),
        (["host", "status", "--url", "nowhere"], "write host:port"),
        (["host", "status", "--url", "https://127.0.0.1:9", "--ca", "none.pem"], "ca=none.pem"),
        (["host", "status", "ranker"], "ranker"),
        (["host", "nowhere/models"], "nowhere/models is not a folder"),
        (["host"], "no repository is named"),
        (["host", "--htp", "8"], "did you mean"),
        (["host", ".", "--http", "99999"], "http=.* is not an address"),
    ],
)
def test_mistakes_of_the_user_are_exit_code_2(capsys, words, message):
    assert fornax(words) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said


def test_what_speaks_no_http_is_not_repeated(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"\0\0\x18\x04\0\0\0\0\0\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert fornax(["host", "status", "--url", f"127.0.0.1:{listener.getsockname()[1]}"]) == 2
        thread.join()
    assert "does not speak HTTP; is it the port of gRPC?" in capsys.readouterr().err


def test_help_names_the_commands_and_the_config(capsys):
    assert fornax(["host", "--help"]) == 0
    assert "fornax host models/ --http 8080 --grpc 8081" in capsys.readouterr().out
    assert fornax(["host", "--print-config"]) == 0
    assert "drain_seconds: 30.0" in capsys.readouterr().out
