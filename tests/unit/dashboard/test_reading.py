"""Files read by another process: the same as read here, and continued from there."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from fornax.dashboard.folder import Folder
from fornax.dashboard.numbers import NumbersCache, Query
from fornax.dashboard.reading import Reader, Reading


def lines(begin: int, end: int) -> bytes:
    """Records with a metric that few have, nulls, a spike, lines that are none, NaN as Python
    writes it, and integers beyond what a double holds exactly."""
    found = []
    for step in range(begin, end):
        record = {
            "step": step,
            "loss": 2.0 + 0.01 * (step % 7),
            "grad_norm": 1.0,
            "n": 2**60 + step,
        }
        if step % 25 == 0:
            record["eval/loss"] = None if step % 50 == 0 else step / 3
        if step in (400, 700):
            record["loss"] = 50.0
        text = json.dumps(record)
        found.append(text.replace("50.0", "NaN") if step == 500 else text)
        if step % 100 == 0:
            found += ["[1, 2]", "no json", json.dumps({"step": step, "text": "x", "ok": True})]
    return ("\n".join(found) + "\n").encode()


def alike(one: Reading, other: Reading) -> None:
    assert one.table.names() == other.table.names()
    assert one.table.rows == other.table.rows
    for name in (*one.table.names(), "step"):
        np.testing.assert_array_equal(one.table.dense(name), other.table.dense(name))
    assert one.tail.state() == other.tail.state()
    assert one.spikes.state() == other.spikes.state()


def test_another_process_reads_the_same_and_this_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(0, 600) + b'{"step": 600, "lo')
    folder = Folder(tmp_path)
    here, there = Reading(folder, path), Reading(folder, path)
    reader = Reader(folder)
    try:
        reader.read(there, path)
        here.go_on()
        alike(here, there)
        assert here.spikes.count == 1
        assert here.tail.junk > 0
        with path.open("ab") as file:
            file.write(b'ss": 2.0, "grad_norm": 1.0}\n' + lines(601, 800))
        here.go_on()
        there.go_on()
        alike(here, there)
        assert here.spikes.count == 2
        path.write_bytes(lines(0, 10))  # another file
        here.go_on()
        there.go_on()
        alike(here, there)

        outside = tmp_path.parent / "outside.jsonl"
        outside.write_bytes(lines(0, 10))
        nothing = Reading(folder, outside)
        reader.read(nothing, outside)
        assert nothing.table.rows == 0
        os.kill(reader.pid, signal.SIGKILL)
        with pytest.raises(EOFError):
            reader.read(Reading(folder, path), path)
    finally:
        reader.close()


def test_runs_are_read_where_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(0, 20_000))

    def refused(folder: Folder) -> Reader:
        raise OSError("no process")

    monkeypatch.setattr("fornax.dashboard.numbers.Reader", refused)
    monkeypatch.setattr("fornax.dashboard.numbers._AT_ONCE", 0)
    cache = NumbersCache(Folder(tmp_path))
    query = Query("a", "loss", "step", 100, None, None)
    assert b'"complete":false' in cache.series([(query, path)])
    try:
        for thread in cache._threads:
            assert thread.is_alive()
        cache.whole("a", path)
        assert b'"complete":true' in cache.series([(query, path)])
    finally:
        cache.close()
