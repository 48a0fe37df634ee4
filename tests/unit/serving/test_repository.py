"""Reading a repository: what is a model, a version, complete, inside."""

import json
import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.serving.fakes import deploy

from fornax.config import ServingError
from fornax.serving.lifecycle.plan import Choice, choose
from fornax.serving.repository import (
    examine,
    name_problem,
    pin,
    read_pin,
    scan,
    scan_model,
    unpin,
    version_number,
)
from fornax.serving.settings import All, Latest, ModelSettings, Named, Shadow


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return folder.resolve()


def test_versions_are_folders_with_numbers(root):
    for version in (1, 12):
        deploy(root, "ranker", version)
    for odd in ("v3", "03", "-1", "0", "1.5", "٣", "9" * 20):
        (root / "ranker" / odd).mkdir()
    (root / "ranker" / ".7.tmp").mkdir()
    (root / "ranker" / "8").write_text("a file")
    (root / "ranker" / "README").write_text("about")
    model = scan(root)["ranker"]
    assert sorted(model.versions) == [1, 12]
    assert "a file" in model.refused["8"]
    assert "number from 1" in model.refused["v3"]
    assert len(model.refused) == 8
    assert not model.problem


def test_hidden_names_are_passed_over_and_odd_ones_refused(root):
    for name in (".git", "a b", "über", "x:y", "-x", "a" * 129):
        (root / name / "1").mkdir(parents=True)
    os.mkdir(os.fsencode(root) + b"/\xff")
    found = scan(root)
    assert all("not a model name" in each.problem for each in found.values())
    assert len(found) == 6
    assert all(name.isascii() for name in found)


@given(st.text(string.printable + "é\x00", max_size=12))
def test_a_model_name_is_never_a_path(name):
    if not name_problem(name):
        assert "/" not in name
        assert name not in ("", ".", "..")
        assert not name.startswith(".")


@given(st.text(max_size=22))
def test_a_version_is_written_one_way_only(text):
    number = version_number(text)
    assert number is None or str(number) == text


@pytest.mark.parametrize("name", ["..", "../models", "a/b", "", "/etc", "a\x00b", "."])
def test_a_name_asked_for_cannot_leave_the_repository(root, name):
    with pytest.raises(ServingError, match="not a model name"):
        scan_model(root, name)
    with pytest.raises(ServingError, match="not a model name"):
        pin(root, name, 1)


def test_links_may_not_lead_out(root, tmp_path):
    outside = deploy(tmp_path / "elsewhere", "m", 1)
    (root / "linked").symlink_to(outside.parent)
    deploy(root, "m", 1)
    (root / "m" / "2").symlink_to(outside)
    (root / "m" / "3").symlink_to(root / "m" / "1")
    (root / "m" / "4").symlink_to(root / "m" / "nowhere")
    found = scan(root)
    assert "out of the repository" in found["linked"].problem
    assert "out of the repository" in found["m"].refused["2"]
    assert found["m"].versions[3] == root / "m" / "1"
    assert "4" in found["m"].refused


def test_a_repository_may_be_reached_by_a_link(root, tmp_path):
    deploy(root, "m", 1)
    linked = tmp_path / "linked"
    linked.symlink_to(root.parent)
    reached = linked / root.name
    folder = scan(reached)["m"].versions[1]
    assert examine(reached, folder) == examine(root, folder)
    assert not examine(reached, folder).waiting


def test_a_manifest_or_settings_that_lead_out_are_not_read(root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"files": {}}')
    folder = deploy(root, "m", 1)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(secret)
    assert "out of the repository" in examine(root, folder).waiting
    (root / "m" / "serving.yaml").symlink_to(secret)
    assert "out of the repository" in scan(root)["m"].problem


def test_a_pipe_does_not_hold_the_reader(root):
    deploy(root, "m", 1)
    os.mkfifo(root / "m" / "serving.yaml")
    assert "not a regular file" in scan(root)["m"].problem


def test_settings_are_strict_and_name_the_nearest_key(root):
    deploy(root, "m", 1)
    (root / "m" / "serving.yaml").write_text("bacthing: {}\n")
    assert "did you mean batching" in scan(root)["m"].problem
    (root / "m" / "serving.yaml").write_text("type: lmm\n")
    assert "did you mean llm" in scan(root, frozenset(["llm"]))["m"].problem
    (root / "m" / "serving.yaml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in scan(root)["m"].problem


def test_another_type_keeps_its_own_settings(root):
    (root / "chat").mkdir()
    (root / "chat" / "serving.yaml").write_text("type: llm\nmodel: x\n")
    model = scan(root, frozenset(["llm"]))["chat"]
    assert (model.type, model.entry) == ("llm", {"model": "x"})


def test_a_version_waits_until_every_listed_file_has_come(root):
    folder = root / "m" / "1"
    folder.mkdir(parents=True)
    assert "no manifest.json" in examine(root, folder).waiting
    manifest = json.dumps({"files": {"weights/d/0": {"size": 5}, "a": {"size": 1}}})
    (folder / "manifest.json").write_text(manifest[:20])
    assert "not whole" in examine(root, folder).waiting
    (folder / "manifest.json").write_text(manifest)
    assert "0 of 5 bytes, and 1 more" in examine(root, folder).waiting
    (folder / "weights" / "d").mkdir(parents=True)
    (folder / "weights" / "d" / "0").write_bytes(b"123")
    (folder / "a").write_bytes(b"1")
    half = examine(root, folder)
    assert half.waiting == "weights/d/0 has 3 of 5 bytes"
    (folder / "weights" / "d" / "0").write_bytes(b"12345")
    whole = examine(root, folder)
    assert not whole.waiting
    assert whole.fingerprint != half.fingerprint
    assert examine(root, folder) == whole


def test_a_manifest_cannot_make_us_look_outside(root):
    folder = deploy(root, "m", 1)
    names = {"../../x": {"size": 1}, "/etc/passwd": {"size": 1}, "content": {"size": "1"}}
    (folder / "manifest.json").write_text(json.dumps({"files": names}))
    assert not examine(root, folder).waiting


@pytest.mark.parametrize("text", ["[]", "3", '{"files": 3}', '{"files": {"a": 3}}', "{}"])
def test_a_manifest_of_another_shape_is_left_to_the_verification(root, text):
    folder = deploy(root, "m", 1)
    (folder / "manifest.json").write_text(text)
    assert not examine(root, folder).waiting


def test_a_deep_manifest_is_no_crash(root):
    folder = deploy(root, "m", 1)
    (folder / "manifest.json").write_text("[" * 200_000)
    assert "not JSON" in examine(root, folder).waiting


def test_folders_deeper_than_any_bundles_wait_and_stop_nothing_else(root):
    folder = deploy(root, "m", 1)
    (folder / "/".join("d" * 40)).mkdir(parents=True)
    assert "more than 32 folders deep" in examine(root, folder).waiting


def test_a_pin_is_written_whole_and_read_back(root):
    folder = deploy(root, "m", 2).parent
    assert read_pin(root, folder) is None
    pin(root, "m", 2)
    assert read_pin(root, folder) == 2
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    with pytest.raises(ServingError, match="no version 3"):
        pin(root, "m", 3)
    assert unpin(root, "m")
    assert not unpin(root, "m")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2}', '{"version": "-1"}', "[" * 4000]
)
def test_a_pin_of_another_shape_stops_the_model_where_it_is(root, text):
    deploy(root, "m", 2)
    (root / "m" / "pin.json").write_text(text)
    assert "fix or remove" in scan(root)["m"].problem.lower()


def test_a_repository_that_is_away_is_an_error_and_no_empty_one(root):
    with pytest.raises(ServingError, match="stay as they are"):
        scan(root / "gone")


ANY = ModelSettings()


@pytest.mark.parametrize(
    ("settings", "pinned", "bad", "choice"),
    [
        (ANY, None, (), Choice((4,))),
        (ANY, None, (4,), Choice((3,))),
        (ANY, None, (1, 2, 3, 4), Choice(())),
        (ModelSettings(versions=Latest(count=2)), None, (3,), Choice((4, 2))),
        (ModelSettings(versions=All()), None, (3,), Choice((4, 3, 2, 1))),
        (ModelSettings(versions=Named(versions=(1, 9))), None, (), Choice((9, 1))),
        (ANY, 2, (), Choice((2,), withheld=frozenset((3, 4)))),
        (ANY, 2, (2,), Choice((1,), withheld=frozenset((3, 4)))),
        (
            ModelSettings(versions=Named(versions=(1, 4))), 3, (),
            Choice((3, 1), withheld=frozenset((4,))),
        ),
        (
            ModelSettings(labels={"old": 1, "new": 4, "far": 7}), None, (),
            Choice((4,), frozenset((1, 7))),
        ),
        (
            ModelSettings(labels={"new": 4}), 3, (),
            Choice((3,), withheld=frozenset((4,))),
        ),
        (ModelSettings(shadow=Shadow(version=4)), None, (), Choice((3,), shadow=4)),
        (ModelSettings(shadow=Shadow(version=9)), None, (), Choice((4,), shadow=9)),
        (
            ModelSettings(shadow=Shadow(version=4)), 2, (),
            Choice((2,), shadow=4, withheld=frozenset((3,))),
        ),
        (
            ModelSettings(shadow=Shadow(version=2)), 2, (),
            Choice((2,), withheld=frozenset((3, 4))),
        ),
    ],
)  # fmt: skip
def test_the_policy_picks(settings, pinned, bad, choice):
    assert choose(settings, [1, 2, 3, 4], pinned, lambda v: v not in bad) == choice
