"""Progress of work in stages: lines with rate and time left where there is no terminal."""

import re
import sys

from fornax.cli.stages import Stages


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_a_line_comes_each_interval_and_at_the_end(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    with Stages("records", interval=10.0) as progress:
        for step in range(1, 31):
            clock.now += 1.0
            progress("write", step * 10, 300)
    assert capsys.readouterr().err.splitlines() == [
        "write: 100 of 300 records, 10 records/s, 20 s left",
        "write: 200 of 300 records, 10 records/s, 10 s left",
        "write: 300 of 300 records, 10 records/s, 0 s left",
    ]


def test_the_rate_of_a_stage_counts_from_the_end_of_the_one_before(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    with Stages("records") as progress:
        clock.now += 5.0
        progress("read", 10, 10)
        clock.now += 2.0
        progress("write", 10, 10)
    assert capsys.readouterr().err.splitlines() == [
        "read: 10 of 10 records, 2 records/s, 0 s left",
        "write: 10 of 10 records, 5 records/s, 0 s left",
    ]


def test_a_terminal_shows_a_bar_for_each_stage(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Stages("records") as progress:
        progress("read", 1, 2)
        progress("write", 2, 2)
    err = capsys.readouterr().err
    assert re.search(r"read\b.*1/2.*records/s", err)
    assert re.search(r"write\b.*2/2.*records/s", err)
