"""`fornax ui` as a process over real runs: what is written shows, and nothing wrong is an error."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.unit.dashboard.conftest import Site, served

from fornax.config.goodput import summarise
from fornax.config.jsonl import JsonLines, keep_json_lines
from fornax.train import read_metrics

Write = Callable[..., None]


def events(
    site: Site,
    query: str,
    ends: Callable[[list], bool],
    then: Callable[[], None] | None = None,
    **headers: str,
) -> list:
    """The events of a stream as (id, kind, data, time), until they are enough; `then` happens a
    while after it has begun."""
    found: list[tuple[str, str, Any, float]] = []
    address = f"{site.base}/api/live?{query}"
    with httpx.stream("GET", address, headers=headers, timeout=120) as response:
        assert response.status_code == 200, response.read()
        timer = threading.Timer(0.7, then or (lambda: None))
        if then is not None:
            timer.start()
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            fields[name] = value
            if line == "" and "event" in fields:
                found.append(
                    (fields["id"], fields["event"], json.loads(fields["data"]), time.time())
                )
                if ends(found):
                    if then is not None:
                        timer.join()
                    return found
            if line == "":
                fields = {}
    return found


def kinds(found: list) -> list[str]:
    return [kind for _, kind, _, _ in found]


def test_the_page_and_its_parts(site: Site) -> None:
    page = site.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "'sha256-" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in ("/static/dashboard/app.js", "/static/fornax/vendor/uplot/uPlot.iife.min.js"):
        assert site.get(path).headers["content-type"].startswith("text/javascript")
    assert site.json("/api/about")["control"] is False


def test_the_list_has_what_the_run_logged(site: Site, trained: Path) -> None:
    (run,) = (r for r in site.json("/api/runs")["runs"] if r["id"] == "tiny")
    records = read_metrics(trained / "metrics.jsonl")
    assert run["metrics"]["loss"] == records[-1]["loss"]
    assert (run["step"], run["steps"], run["status"]) == (12, 12, "finished")
    first = site.get("/api/runs")
    again = site.get("/api/runs", 304, headers={"if-none-match": first.headers["etag"]})
    assert again.content == b""


def test_curves_are_the_records(site: Site, trained: Path) -> None:
    records = read_metrics(trained / "metrics.jsonl")
    query = "run=tiny&name=loss&name=eval/loss&name=none"
    loss, held_out, none = site.json(f"/api/series?{query}")["series"]
    assert loss["x"] == [r["step"] for r in records]
    assert loss["y"] == loss["min"] == loss["max"] == [r["loss"] for r in records]
    assert loss["complete"] is True
    assert loss["offset"] == (trained / "metrics.jsonl").stat().st_size
    assert held_out["x"] == [6, 12]
    assert (none["x"], none["n"]) == ([], 0)
    tokens = site.json("/api/series?run=tiny&name=loss&x=tokens")["series"][0]
    assert tokens["x"] == [r["tokens"] for r in records]


def test_what_a_run_tells_of_itself(site: Site, trained: Path) -> None:
    run = site.json("/api/runs/tiny")
    assert [each["step"] for each in run["checkpoints"]] == [6, 12]
    assert all(each["bytes"] > 10_000 for each in run["checkpoints"])
    assert "report.html" in run["pages"]
    assert "checkpoints" in run["folders"]
    assert run["config_text"] == (trained / "config.yaml").read_text()
    assert run["measured"]["step_seconds"] > 0

    account = site.json("/api/runs/tiny/goodput")
    total = summarise(trained / "goodput.jsonl")
    assert account["goodput"] == pytest.approx(total.goodput)
    for before, after in zip(account["spans"], account["spans"][1:], strict=False):
        assert before["end"] == after["begin"]
        assert before["cause"] != after["cause"]

    data = site.json("/api/runs/tiny/data")
    assert data["dataset"]["documents"] == data["dataset"]["parts"][0]["documents"] > 80
    assert data["packing"] == "concat_then_split"
    assert data["rows"] == 12 * 8
    assert data["epoch"] == pytest.approx(96 / data["dataset"]["rows"])
    assert [p["shard"] for p in data["positions"]] == list(range(8))

    programs = {p["name"]: p for p in site.json("/api/runs/tiny/memory")["programs"]}
    assert programs.keys() == {"step", "evaluate"}
    step = programs["step"]
    assert step["flops"] > programs["evaluate"]["flops"] > 0
    assert sum(step["owners"].values()) >= step["peak_bytes"] > step["owners"]["optimizer"]

    names = site.json("/api/runs/tiny/names")
    assert names["x"] == ["step", "tokens", "time"]
    assert {"loss", "eval/loss", "grad_norm"} <= {row["name"] for row in names["names"]}
    for part in ("samples", "events", "server", "images"):
        site.get(f"/api/runs/tiny/{part}")
    assert site.json("/api/runs/tiny/quantization") is None


def test_pages_of_a_run_are_kept_in_a_sandbox(site: Site) -> None:
    report = site.get("/files?run=tiny&path=report.html")
    assert report.headers["content-security-policy"].startswith("sandbox")
    assert "connect-src" not in report.headers["content-security-policy"]
    for path in ("config.yaml", "metrics.jsonl", "checkpoints", "../tiny/config.yaml"):
        site.get("/files", 404, params={"run": "tiny", "path": path})


def test_an_export_holds_the_answers(site: Site) -> None:
    page = site.get("/export?run=tiny").text
    held = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["answers"]
    live = site.json("/api/series?run=tiny&name=loss&x=step")
    assert held["/api/series?run=tiny&name=loss&x=step"] == live
    assert held["/api/runs/tiny"]["step"] == 12
    assert "http://" not in page.replace("http://www.w3.org/", "")
    whole = site.get("/export").text
    assert '"/api/runs"' in whole


def test_an_appended_line_shows(site: Site, write: Write) -> None:
    path = site.folder / "live" / "metrics.jsonl"
    write(path, {"step": 1, "loss": 1.0})
    offset = path.stat().st_size

    def append() -> None:
        write(path, {"step": 2, "loss": 0.5, "time": time.time()})

    found = events(site, f"run=live&after={offset}", lambda f: "lines" in kinds(f), append)
    (event,) = (e for e in found if e[1] == "lines")
    assert event[2]["records"][0]["step"] == 2
    assert event[0] == str(path.stat().st_size)
    curve = site.json("/api/series?run=live&name=loss")["series"][0]
    assert curve["y"] == [1.0, 0.5]


def test_a_stream_goes_on_where_it_broke(site: Site, write: Write) -> None:
    path = site.folder / "broken" / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2}, {"step": 3})
    second = len('{"step": 1}\n')
    found = events(site, "run=broken&after=0", bool, **{"last-event-id": str(second)})
    assert [r["step"] for r in found[0][2]["records"]] == [2, 3]


def test_a_run_that_is_rewritten_begins_again(site: Site, write: Write) -> None:
    path = site.folder / "rewind" / "metrics.jsonl"
    path.parent.mkdir()
    lines = JsonLines(path)
    for step in range(1, 31):
        lines.write({"step": step, "loss": float(step)})
    lines.close()
    site.get("/api/series?run=rewind&name=loss")

    def rewind() -> None:
        keep_json_lines(path, lambda record: record["step"] <= 20)  # as a resumed run does
        write(path, {"step": 21, "loss": 0.0})

    enough = {"reset", "lines"}
    query = f"run=rewind&after={path.stat().st_size}"
    found = events(site, query, lambda f: enough <= set(kinds(f)), rewind)
    assert kinds(found).index("reset") < kinds(found).index("lines")
    curve = site.json("/api/series?run=rewind&name=loss")["series"][0]
    assert curve["x"] == list(range(1, 22))
    assert curve["y"][-1] == 0.0


def test_a_run_that_is_deleted_while_it_is_read(site: Site, write: Write) -> None:
    path = site.folder / "doomed" / "metrics.jsonl"
    write(path, *({"step": n, "loss": 1.0} for n in range(2000)))
    site.get("/api/series?run=doomed&name=loss")

    def delete() -> None:
        path.unlink()
        path.parent.rmdir()

    found = events(site, "run=doomed", lambda f: {"reset", "runs"} <= set(kinds(f)), delete)
    assert next(data for _, kind, data, _ in found if kind == "reset")["why"] == "gone"
    time.sleep(0.6)
    site.get("/api/runs/doomed", 404)
    site.get("/api/runs")


def test_what_is_half_written_or_damaged_is_no_error(site: Site) -> None:
    run = site.folder / "damaged"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 1.0}\n\x00\xff\xfe\n{"step": 2, "loss": "\\ud800"}\n'
        b'{"step": 3, "loss": 3.0, "n": ' + b"9" * 50 + b'}\n{"step": 4, "lo'
    )
    for name in ("goodput", "events", "samples", "server", "spikes"):
        (run / f"{name}.jsonl").write_bytes(
            b'{"a": [1, {}]}\n[]\n\xff\n{"time": "x", "step": {}}\n'
        )
    for name in ("program", "plan", "data", "quantization_report"):
        (run / f"{name}.json").write_bytes(b'{"programs": 3, "rows": "x", "quantized": []}')
    (run / "config.yaml").write_bytes(b"steps: [\xff\nmodel: &a {b: *a}\n")
    for folder in ("checkpoints/5", "requests", "profile/x", "images"):
        (run / folder).mkdir(parents=True)
    (run / "checkpoints/5/fornax.0.json").write_text('{"crc32": 1, "body": "{}"}')
    (run / "requests/1-profile.json").write_text("[")
    (run / "images/step-7.png").write_bytes(b"\x89PNG")
    (run / "images/secret.png").symlink_to("/etc/passwd")
    parts = ("names", "samples", "goodput", "events", "server", "data", "memory", "images",
             "quantization")  # fmt: skip
    site.get("/api/runs")
    site.get("/api/runs/damaged")
    found = {part: site.json(f"/api/runs/damaged/{part}") for part in parts}
    assert [i["path"] for i in found["images"]["images"]] == ["images/step-7.png"]
    assert found["images"]["images"][0]["step"] == 7
    site.get("/files?run=damaged&path=images/step-7.png")
    site.get("/files?run=damaged&path=images/secret.png", 404)
    site.get("/export?run=damaged")
    curve = site.json("/api/series?run=damaged&name=loss")["series"][0]
    assert curve["y"] == [1.0, 3.0]
    lines = events(site, "run=damaged&after=0", lambda f: "lines" in kinds(f))
    assert [r["step"] for r in lines[0][2]["records"]] == [1, 2, 3]


_WRONG = [
    ("/api/runs/none", 404),
    ("/api/runs/", 404),
    ("/api/runs/../../etc/passwd", 404),
    ("/api/runs/%2e%2e/%2e%2e/etc/passwd", 404),
    ("/api/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
    ("/api/runs/..%5c..%5cetc", 404),
    ("/api/runs/tiny%00", 404),
    ("/api/runs/tiny/..", 404),
    ("/api/runs/tiny/nothing", 404),
    ("/api/runs/tiny/names/names", 404),
    ("/api/runs/%ff%fe", 404),
    ("/api/runs/" + "a" * 5000, 404),
    ("/api/runs/tiny/samples?step=x", 400),
    ("/api/runs/tiny/samples?step=1e400", 400),
    ("/api/runs/tiny/samples?limit=0", 400),
    ("/api/runs/tiny/samples?limit=99999999", 400),
    ("/api/runs/tiny/samples?offset=-1", 400),
    ("/api/runs/tiny/samples?order=__class__", 400),
    ("/api/runs/tiny/events?limit=-5", 400),
    ("/api/series", 400),
    ("/api/series?run=tiny", 400),
    ("/api/series?name=loss", 400),
    ("/api/series?run=none&name=loss", 404),
    ("/api/series?run=tiny&name=loss&x=banana", 400),
    ("/api/series?run=tiny&name=loss&points=9", 400),
    ("/api/series?run=tiny&name=loss&points=1000000", 400),
    ("/api/series?run=tiny&name=loss&points=NaN", 400),
    ("/api/series?run=tiny&name=loss&from=NaN", 400),
    ("/api/series?run=tiny&name=loss&to=abc", 400),
    ("/api/series?run=../tiny&name=loss", 404),
    ("/api/series?run=/etc/passwd&name=loss", 404),
    ("/api/series?" + "&".join(["run=tiny"] * 80 + ["name=a"] * 80), 400),
    ("/api/diff", 400),
    ("/api/diff?run=tiny", 400),
    ("/api/diff?run=tiny&run=none", 404),
    ("/api/live?run=none", 404),
    ("/api/live?run=tiny&after=x", 400),
    ("/api/live?run=tiny&after=-1", 400),
    ("/api/live?run=tiny&after=1,2", 400),
    ("/api/live?run=tiny&after=" + "9" * 30, 400),
    ("/api/live?" + "&".join(["run=tiny"] * 1001), 400),
    ("/files", 400),
    ("/files?run=tiny&path=", 404),
    ("/files?run=tiny&path=../../../../etc/passwd", 404),
    ("/files?run=tiny&path=/etc/passwd", 404),
    ("/files?run=tiny&path=%00.png", 404),
    ("/files?run=tiny&path=report.html%00.png", 404),
    ("/files?run=none&path=report.html", 404),
    ("/export?run=none", 404),
    ("/export?" + "&".join(["run=tiny"] * 21), 400),
    ("/static/", 404),
    ("/static/dashboard/../app.py", 404),
    ("/static/dashboard/%2e%2e/app.py", 404),
    ("/static//etc/passwd", 404),
    ("/static/fornax/vendor", 404),
    ("/docs", 404),
    ("/openapi.json", 404),
    ("/api", 404),
    ("/\u00fc?\u00fc=\u00fc", 404),
]


def raw(site: Site, request: bytes) -> bytes:
    """What a client that sends whatever it likes is answered."""
    host, _, port = site.base.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_fifty_wrong_questions(site: Site) -> None:
    assert len(_WRONG) >= 50
    for path, status in _WRONG:
        target = "".join(c if c.isascii() else f"%{ord(c):02x}" for c in path)
        # Paths as they are: a client's library would resolve dots.
        said = raw(site, f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.split()[1] == str(status).encode(), (path, said[:500])
        assert json.loads(body)["error"]["message"], path
        assert b"nosniff" in head
        assert b"passwd:" not in said
        assert b"root:" not in said
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST"):
        response = site.client.request(method, "/api/runs", headers={"content-length": "0"})
        assert response.status_code in (403, 404, 405, 413), method
    assert site.process.poll() is None
    site.get("/api/runs/tiny")


def test_other_names_are_not_answered(site: Site) -> None:
    for host in ("evil.example", "evil.example:7007", "127.0.0.1.evil.example", "", "[::2]"):
        said = raw(site, f"GET /api/runs HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert said.split()[1] in (b"403", b"400"), host
    for host in ("localhost", "127.0.0.1:7007", "[::1]:7007"):
        said = raw(site, f"GET /api/about HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert said.split()[1] == b"200", host


def test_it_only_reads(site: Site) -> None:
    body = {"kind": "stop"}
    response = site.client.post("/api/runs/tiny/requests", json=body)
    assert response.status_code == 403
    assert "--control" in response.json()["error"]["message"]
    assert not (site.folder / "tiny" / "requests").exists()


def test_twenty_clients_at_once(site: Site, write: Write) -> None:
    for number in range(20):
        records = [{"step": n, "loss": float(number)} for n in range(200)]
        write(site.folder / "many" / str(number) / "metrics.jsonl", *records)
    runs = "&".join(f"run=many/{number}" for number in range(20))
    site.get(f"/api/series?{runs}&name=loss")

    def ask(number: int) -> float:
        with httpx.Client(base_url=site.base, timeout=120) as client:
            for _ in range(5):
                found = client.get(f"/api/series?{runs}&name=loss").json()["series"]
                assert [each["y"][0] for each in found] == list(range(20))
                assert client.get("/api/runs").status_code == 200
                assert client.get(f"/api/runs/many/{number}").json()["step"] == 199
        return 1.0

    with ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(ask, range(20))) == 20


def test_twenty_clients_follow_a_run_to_its_last_line(site: Site, write: Write) -> None:
    path = site.folder / "watched" / "metrics.jsonl"
    write(path, {"step": 0})

    def follow(_: int) -> list[int]:
        def steps(found: list) -> list[int]:
            lines = (data["records"] for _, kind, data, _ in found if kind == "lines")
            return [record["step"] for records in lines for record in records]

        return steps(events(site, "run=watched&after=0", lambda f: 30 in steps(f)))

    with ThreadPoolExecutor(20) as pool:
        followed = [pool.submit(follow, n) for n in range(20)]
        for step in range(1, 31):
            time.sleep(0.03)
            write(path, {"step": step})
        assert [each.result(timeout=120) for each in followed] == [list(range(31))] * 20


def test_text_in_names_stays_text(site: Site, write: Write) -> None:
    name = "<script>alert(1)</script>"
    write(site.folder / "text" / "metrics.jsonl", {"step": 1, name: 1.0, "loss": 1.0})
    page = site.get("/export?run=text").text
    assert name not in page
    assert "\\u003cscript>alert(1)" in page


def test_names_with_spaces_signs_and_slashes(site: Site, write: Write) -> None:
    name = "group a/run #1 ? 100%&+\u00fc"
    write(site.folder / name / "metrics.jsonl", {"step": 1, "loss": 2.0})
    time.sleep(0.6)
    assert name in [run["id"] for run in site.json("/api/runs")["runs"]]
    found = site.json("/api/series", params={"run": name, "name": "loss"})["series"][0]
    assert found["y"] == [2.0]
    path = "/".join(httpx.URL("").copy_with(params={"a": part}).query.decode()[2:]
                    .replace("+", "%20") for part in name.split("/"))  # fmt: skip
    assert site.json(f"/api/runs/{path}/names")["names"][0]["name"] == "loss"


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("controlled")
    (folder / "a").mkdir()
    (folder / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with served(folder, "--control") as found:
        yield found


def test_with_a_token_nothing_is_told_without_it(controlled: Site) -> None:
    assert len(controlled.token) >= 30
    controlled.get("/")
    controlled.get("/static/dashboard/app.js")
    good = {"authorization": f"Bearer {controlled.token}"}
    wrong: list[dict[str, Any]] = [
        {},
        {"headers": {"authorization": f"Bearer {controlled.token}x"}},
        {"headers": {"authorization": f"Basic {controlled.token}"}},
        {"headers": {"authorization": controlled.token}},
        {"headers": {"cookie": f"token={controlled.token}"}},
        {"params": {"token": "wrong"}},
        {"params": {"token": ""}},
    ]
    for path in ("/api/runs", "/api/about", "/api/live", "/export", "/files", "/api/nothing"):
        for options in wrong:
            response = controlled.client.get(path, **options)
            assert response.status_code == 401, (path, options)
            assert response.headers["www-authenticate"] == "Bearer"
    controlled.get("/api/runs", headers=good)
    controlled.get("/api/runs", params={"token": controlled.token})


def test_pages_of_runs_do_not_learn_the_token(controlled: Site) -> None:
    (controlled.folder / "a" / "report.html").write_text("<script>location</script>")
    (controlled.folder / "a" / "other.html").write_text("other")
    asked = {"run": "a", "path": "report.html"}
    sent = controlled.get("/files", 303, params={**asked, "token": controlled.token})
    there = sent.headers["location"]
    assert controlled.token not in there
    assert controlled.get(there).headers["content-security-policy"].startswith("sandbox")
    controlled.get(there.replace("report", "other"), 401)
    controlled.get(there.replace("/files", "/api/runs"), 401)
    controlled.get("/files", 401, params={**asked, "ticket": ""})


def test_requests_reach_the_run(controlled: Site) -> None:
    def post(path: str = "/api/runs/a/requests", **options: Any) -> httpx.Response:
        options.setdefault("headers", {"authorization": f"Bearer {controlled.token}"})
        return controlled.client.post(path, **options)

    asked = post(json={"kind": "profile", "steps": 7})
    assert asked.status_code == 202
    (file,) = (controlled.folder / "a" / "requests").glob("*.json")
    assert file.name == asked.json()["request"]
    assert json.loads(file.read_text()) == {"kind": "profile", "steps": 7}
    good = {"authorization": f"Bearer {controlled.token}"}
    run = controlled.json("/api/runs/a", headers=good)
    assert [(r["kind"], r["done"]) for r in run["requests"]] == [("profile", False)]
    file.unlink()

    assert post(json={"kind": "stop"}, headers={}).status_code == 401
    assert post("/api/runs/none/requests", json={"kind": "stop"}).status_code == 404
    bodies = [
        {"kind": "format the disk"},
        {"kind": "profile", "steps": 0},
        {"kind": "profile", "steps": "many"},
        {"kind": "stop", "run_dir": "/tmp"},
        {"kind": 3},
        [],
        {},
    ]
    for body in bodies:
        assert post(json=body).status_code == 400, body
    typed = {**good, "content-type": "text/plain"}
    assert post(content=b'{"kind": "stop"}', headers=typed).status_code == 415
    elsewhere = {**good, "origin": "http://evil.example"}
    assert post(json={"kind": "stop"}, headers=elsewhere).status_code == 403
    assert post(content=b"x" * 100_000).status_code == 413
    assert list((controlled.folder / "a" / "requests").glob("*")) == []
    (controlled.folder / "a" / "requests").rmdir()
    (controlled.folder / "a" / "requests").symlink_to("/tmp")
    assert post(json={"kind": "stop"}).status_code == 400


def test_control_c_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1}\n')
    with served(tmp_path) as site:
        with site.client.stream("GET", "/api/live?run=a") as response:
            told = response.iter_bytes()
            next(told)
            site.process.send_signal(signal.SIGINT)
            list(told)  # it ends
        assert site.process.wait(timeout=120) == 0
        assert site.process.communicate()[1] == ""


def test_memory_is_bounded_and_evicted_curves_stay(tmp_path: Path, write: Write) -> None:
    from fornax.dashboard.folder import Folder
    from fornax.dashboard.numbers import NumbersCache, Query

    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{n}.jsonl" for n in range(6)]
    for path in paths:
        write(path, *({"step": n, "loss": float(rng.normal())} for n in range(2000)))
    cache = NumbersCache(Folder(tmp_path), limit_bytes=100_000)
    queries = [(Query(p.name, "loss", "step", 50, None, None), p) for p in paths]
    first = cache.series(queries)
    assert cache.nbytes <= 100_000
    assert cache.series(queries) == first
    assert cache.nbytes <= 100_000
    cache.close()


def test_long_files_are_sampled_first_and_exact_soon(tmp_path: Path, write: Write) -> None:
    from fornax.dashboard import numbers
    from fornax.dashboard.folder import Folder

    path = tmp_path / "long.jsonl"
    records = [{"step": n, "loss": float(n % 97), "pad": "x" * 2000} for n in range(30_000)]
    write(path, *records)
    assert path.stat().st_size > numbers._AT_ONCE
    cache = numbers.NumbersCache(Folder(tmp_path))
    query = (numbers.Query("long", "loss", "step", 100, None, None), path)
    (sampled,) = json.loads(cache.series([query]))
    assert sampled["complete"] is False
    assert 0 < sampled["n"] < 3000
    assert sampled["x"][0] < 100
    assert sampled["x"][-1] > 29_900
    until = time.monotonic() + 240
    while not cache.completed and time.monotonic() < until:
        time.sleep(0.05)
    (exact,) = json.loads(cache.series([query]))
    assert (exact["complete"], exact["n"]) == (True, 30_000)
    assert (min(exact["min"]), max(exact["max"])) == (0.0, 96.0)
    cache.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere/"], "not a folder"),
        ([".", "--port", "99999"], r"port=99999 must be in"),
        ([".", "--host", "0.0.0.0"], "--token-file"),
        ([".", "--host", "0.0.0.0", "--token-file", "none.txt"], "token_file=none.txt"),
        ([".", "--host", "256.1.1.1", "--token-file", "t.txt"], "cannot be listened on"),
        ([], "RUNS"),
    ],
)
def test_wrong_words_are_one_paragraph(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    from fornax.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("secret\n")
    assert main(["ui", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert said.count("\n") == 1
