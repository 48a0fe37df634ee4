"""Captures of runs as pages: which are found, what is made of them, and within which bounds."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.unit.dashboard.captured import captured_runs
from tests.unit.dashboard.conftest import Site, served
from tests.unit.profile.conftest import measured_cpu

from fornax.dashboard.answers import RefusedError
from fornax.dashboard.captures import find_capture, list_captures
from fornax.dashboard.folder import Folder
from fornax.dashboard.profile_pages import ProfilePages
from fornax.dashboard.runs import Found, discover

__all__ = ["measured_cpu"]


def a_capture(folder: Path, content: bytes = b"x") -> Path:
    folder.mkdir(parents=True)
    (folder / "vm.xplane.pb").write_bytes(content)
    return folder


def the_run(root: Path) -> tuple[Folder, Found]:
    (root / "a").mkdir(parents=True, exist_ok=True)
    (root / "a/metrics.jsonl").write_text('{"step": 1}\n')
    folder = Folder(root)
    return folder, discover(folder)[0][0]


def test_captures_lie_anywhere_below_profile(tmp_path: Path) -> None:
    names = (".", "plugins/profile/1", "continuous/plugins/profile/2", "server/plugins/profile/3")
    for name in names[1:]:
        a_capture(tmp_path / "runs/a/profile" / name)
    (tmp_path / "runs/a/profile/host-0.xplane.pb").write_bytes(b"x")
    (tmp_path / "runs/a/profile/host-1.xplane.pb").write_bytes(b"xy")
    (tmp_path / "runs/a/profile/.capture-x").mkdir()
    found = list_captures(*the_run(tmp_path / "runs"))
    assert sorted(each.name for each in found) == sorted(names)
    top = next(each for each in found if each.name == ".")
    assert (top.ranks, top.bytes) == (2, 3)


def test_no_capture_leads_out_of_the_folder_of_runs(tmp_path: Path) -> None:
    outside = a_capture(tmp_path / "outside")
    top = tmp_path / "runs/a/profile"
    a_capture(top / "good")
    (top / "linked").symlink_to(outside)
    (top / "inner").mkdir()
    (top / "inner/vm.xplane.pb").symlink_to(outside / "vm.xplane.pb")
    a_capture(top / "record")
    (top / "record/capture-0.json").symlink_to("/etc/passwd")
    os.mkfifo(a_capture(top / "pipe") / "other.xplane.pb")
    folder, run = the_run(tmp_path / "runs")
    assert [each.name for each in list_captures(folder, run)] == ["good"]
    for name in ("../../outside", "../profile/good", "/etc", str(outside), "good/", "linked", "\0"):
        assert find_capture(folder, run, name) is None


@pytest.mark.parametrize(
    ("bounds", "why"),
    [({"seconds": 0.0}, "not made in 0 s"), ({"memory_bytes": 1 << 20}, "more than 1 MiB")],
)
def test_what_makes_a_page_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, float], why: str
) -> None:
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path / "cache"))
    a_capture(tmp_path / "runs/a/profile/one")
    pages = ProfilePages(**bounds)  # pyrefly: ignore[bad-argument-type]
    try:
        _, done = pages.ask(list_captures(*the_run(tmp_path / "runs")))
        with pytest.raises(RefusedError, match=why):
            done.result(240)
    finally:
        pages.close()
    assert not list((tmp_path / "cache").rglob("*.html"))


def test_a_cache_that_cannot_be_written_is_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path / "cache"))
    a_capture(tmp_path / "runs/a/profile/one")
    pages = ProfilePages()
    try:
        _, done = pages.ask(list_captures(*the_run(tmp_path / "runs")))
        with pytest.raises(RefusedError, match="FORNAX_CACHE_DIR"):
            done.result(240)
    finally:
        pages.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, measured_cpu: Path) -> Iterator[Site]:
    with served(captured_runs(tmp_path_factory.mktemp("captured")), "--control") as found:
        found.client.headers["authorization"] = f"Bearer {found.token}"
        yield found


def made(site: Site, status: int = 200, **query: str) -> httpx.Response:
    return site.get("/api/profile", status, params=query, timeout=300)


def whole(site: Site, run: str) -> str:
    names = [each["name"] for each in site.json(f"/api/runs/{run}")["profiles"]]
    return next(name for name in names if name != "cut-off")


@pytest.mark.slow
def test_pages_are_made_once_and_lie_outside_of_runs(site: Site, measured_cpu: Path) -> None:
    before = sorted(site.folder.rglob("*"))
    page = made(site, run="before", capture=whole(site, "before")).json()["page"]
    shown = httpx.get(site.base + page, timeout=120)
    assert shown.status_code == 200
    assert shown.headers["content-security-policy"].startswith("sandbox allow-scripts; default-src")
    assert '"compared":null' in shown.text.replace(" ", "")
    kept = list((measured_cpu / "profile-pages").iterdir())
    assert len(kept) == 1
    written = kept[0].stat().st_ino
    assert made(site, run="before", capture=whole(site, "before")).json()["page"] == page
    assert [each.stat().st_ino for each in (measured_cpu / "profile-pages").iterdir()] == [written]
    assert sorted(site.folder.rglob("*")) == before
    forged = page.partition("&ticket=")[0]
    for address in (forged, forged + "&ticket=", page + "0", page.replace("key=", "key=x")):
        assert httpx.get(site.base + address, timeout=120).status_code == 401
        site.get(address, 404)


@pytest.mark.slow
def test_what_cannot_be_shown_is_one_paragraph(site: Site) -> None:
    asked = ({"capture": "cut-off"}, {"capture": whole(site, "after"), "before": "cut-off"})
    for query in asked:
        message = made(site, 400, run="after", **query).json()["error"]["message"]
        assert "truncated" in message
        assert "\n" not in message
    made(site, 404, run="after", capture="none")
    made(site, 404, run="after", capture=whole(site, "after"), before="none")
    made(site, 404, run="after", capture=whole(site, "after"), before="x", before_run="none")
    made(site, 400, run="after")
