"""What a server writes of itself while it runs."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from fornax.config import ConfigError, server_file
from fornax.config.jsonl import read_json_lines
from fornax.config.server_file import recording_server


def record(run_dir: Path | None, lines: int = 0, **row: object) -> None:
    """Run until so many lines are written."""
    written = 0

    def counted(since: float) -> dict[str, object]:
        nonlocal written
        written += 1
        return {"since": since, **row}

    async def serve() -> None:
        with recording_server(run_dir, "serve", "m", counted):
            while written < lines:
                await asyncio.sleep(0.01)

    asyncio.run(serve())


def test_lines_are_written_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file, "_SECONDS", 0.05)
    began = time.monotonic()
    record(tmp_path / "new" / "run", 4, running=3)
    took = time.monotonic() - began
    lines = read_json_lines(tmp_path / "new" / "run" / "server.jsonl")
    assert len(lines) >= 5
    assert all(
        (line["kind"], line["model"], line["running"]) == ("serve", "m", 3) for line in lines
    )
    assert [line.get("stopped") for line in lines] == [None] * (len(lines) - 1) + [True]
    assert min(line["since"] for line in lines[1:-1]) > 0.049
    assert sum(line["since"] for line in lines) < took


def test_a_long_file_loses_its_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(1000)) + '{"torn')
    monkeypatch.setattr(server_file, "_MOST_BYTES", 8000)
    record(tmp_path)
    lines = read_json_lines(path)
    assert path.stat().st_size < 10_000
    assert lines[0] == {"n": 500}
    assert lines[-1]["stopped"] is True


def test_nothing_is_written_where_nothing_is_named(tmp_path: Path) -> None:
    record(None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another with --run-dir"):
        record(tmp_path / "file" / "run")
