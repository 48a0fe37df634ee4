"""Requests to a run by files: asked, read, answered, and whatever else lies in the folder."""

import json
import os
from pathlib import Path

import pytest

from fornax.config.errors import ConfigError
from fornax.config.run_requests import MOST_STEPS, answer, answer_of, ask, pending


def test_what_is_asked_is_found_in_order_and_answered_once(tmp_path: Path) -> None:
    paths = [ask(tmp_path, "profile", steps=3), ask(tmp_path, "checkpoint"), ask(tmp_path, "stop")]
    found = pending(tmp_path)
    assert [(each.kind, dict(each.values)) for each in found] == [
        ("profile", {"steps": 3}),
        ("checkpoint", {}),
        ("stop", {}),
    ]
    assert [each.path for each in found] == paths
    assert answer_of(paths[0]) is None
    answer(found[0], result={"directory": "there"})
    answer(found[1], error="no room")
    assert [each.kind for each in pending(tmp_path)] == ["stop"]
    done = answer_of(paths[0])
    assert done is not None
    assert (done["kind"], done["steps"], done["result"]) == ("profile", 3, {"directory": "there"})
    refused = answer_of(paths[1])
    assert refused is not None
    assert refused["error"] == "no room"
    assert paths[0].with_suffix(".done.json").is_file()


def test_many_asked_within_a_millisecond_are_all_kept(tmp_path: Path) -> None:
    paths = {ask(tmp_path, "checkpoint") for _ in range(50)}
    assert len(paths) == len(pending(tmp_path)) == 50


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("pause", {}, "profile, checkpoint, stop"),
        ("profile", {"steps": 0}, f"from 1 to {MOST_STEPS}"),
        ("profile", {"steps": True}, "from 1 to"),
        ("profile", {"seconds": 3}, "takes only steps"),
        ("stop", {"now": 1}, "takes no values"),
    ],
)
def test_what_no_run_can_do_is_refused_before_it_is_written(
    tmp_path: Path, kind: str, values: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(tmp_path, kind, **values)
    assert not (tmp_path / "requests").exists()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory of a run"):
        ask(tmp_path / "nowhere", "stop")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "must hold an object"),
        ("{}", "says None"),
        ('{"kind": "stop", "x": 1}', "takes no values"),
        ('{"kind": "profile", "steps": 1e9}', "from 1 to"),
        ('{"kind": ["stop"]}', "profile, checkpoint, stop"),
        ("\xff" * 10, "not JSON"),
        (" " * 70_000 + "{}", "not a file of a request"),
    ],
)
def test_what_is_no_request_says_why(tmp_path: Path, content: str, said: str) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "1700000000000-stop.json").write_bytes(content.encode("latin-1"))
    (found,) = pending(tmp_path)
    assert found.kind is None
    assert said in (found.error or "")
    answer(found, error=found.error)
    assert pending(tmp_path) == []


def test_neither_links_nor_pipes_nor_folders_are_read(tmp_path: Path) -> None:
    folder, secret = tmp_path / "requests", tmp_path / "secret.json"
    folder.mkdir()
    secret.write_text(json.dumps({"kind": "stop"}))
    (folder / "1-stop.json").symlink_to(secret)
    os.mkfifo(folder / "2-stop.json")
    (folder / "3-stop.json").mkdir()
    (folder / "4-stop.txt").write_text("{}")
    (folder / ".5-stop.json.draft").write_text("{}")
    assert [each.kind for each in pending(tmp_path)] == [None, None, None]
