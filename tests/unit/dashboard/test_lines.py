"""Files that grow, shrink, are replaced, are half written, hold junk, or go."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import HUGE, Tail, last_lines


def tail_of(path: Path) -> Tail:
    return Tail(Folder(path.parent), path)


def read(tail: Tail) -> list[dict]:
    found, more = [], True
    while more:
        chunk = tail.read(4096)
        found += tail.records(chunk)
        more = chunk.more
    return found


_LINE = st.one_of(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=40), max_size=3).map(
        json.dumps
    ),
    st.text(alphabet='{}[]":,x\\ ', max_size=20),
)


@given(
    lines=st.lists(_LINE, max_size=30),
    cuts=st.lists(st.integers(min_value=1, max_value=50), max_size=40),
)
def test_however_a_file_is_written_each_object_comes_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("f") / "metrics.jsonl"
    data = "".join(line + "\n" for line in lines).encode()
    tail, found, at = tail_of(path), [], 0
    path.touch()
    for cut in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[at : at + cut])
        at += cut
        found += read(tail)
    wanted, junk = [], 0
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            wanted.append(value)
        else:
            junk += bool(line.strip())
    assert (found, tail.junk) == (wanted, junk)
    assert tail.offset == len(data)


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    tail = tail_of(path)
    assert read(tail) == [{"step": 1}]
    assert read(tail) == []
    with path.open("a") as file:
        file.write('p": 2}\n')
    assert read(tail) == [{"step": 2}]


@pytest.mark.parametrize("how", ["shrunk", "replaced", "rewritten longer", "gone and back"])
def test_another_content_begins_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = tail_of(path)
    read(tail)
    new = '{"step": 7}\n' if how == "shrunk" else '{"step": 7}\n{"step": 8}\n{"step": 9}\n'
    if how == "replaced":
        (tmp_path / "new").write_text(new)
        os.replace(tmp_path / "new", path)
    elif how == "gone and back":
        path.unlink()
        gone = tail.read()
        assert (gone.gone, gone.restarted) == (True, True)
        assert not tail.read().restarted  # that is said once
        path.write_text(new)
    else:
        path.write_text(new)
    chunk = tail.read()
    assert chunk.restarted == (how != "gone and back")
    assert [record["step"] for record in tail.records(chunk)] == list(range(7, 7 + new.count("\n")))


def test_huge_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with path.open("w") as file:
        file.write('{"step": 1}\n' + '{"x": "' + "a" * (2 * HUGE + 17) + '"}\n{"step": 2}\n')
    tail = tail_of(path)
    assert [record["step"] for record in read(tail)] == [1, 2]
    assert tail.huge == 1


def test_junk_of_all_kinds_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [b"\x00\xff\xfe\x80", b"[1, 2]", b"17", b'"text"', b"[" * 100_000, b'{"a": 1', b"null"]
    path.write_bytes(b"\n".join([*lines, b'{"loss": NaN}', b'{"n": ' + b"9" * 40 + b"}", b""]))
    tail = tail_of(path)
    found = read(tail)
    assert [list(record) for record in found] == [["loss"], ["n"]]
    assert tail.junk == len(lines)


def test_what_leads_out_of_the_folder_is_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"secret": 1}\n')
    inside = tmp_path / "runs"
    inside.mkdir()
    (inside / "a.jsonl").symlink_to(secret)
    (inside / "b.jsonl").write_text('{"step": 1}\n')
    (inside / "c.jsonl").symlink_to(inside / "b.jsonl")
    folder = Folder(inside)
    assert last_lines(folder, inside / "a.jsonl", 100) == []
    assert last_lines(folder, inside / ".." / "secret.jsonl", 100) == []
    assert last_lines(folder, inside / "c.jsonl", 100) == [{"step": 1}]
    with pytest.raises(FileNotFoundError, match="not in the folder"):
        folder.open(f"{inside}/b.jsonl\0")


def test_a_pipe_does_not_hold_the_server(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.jsonl")
    assert tail_of(tmp_path / "m.jsonl").read().gone
