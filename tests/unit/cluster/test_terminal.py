"""What a launched run shows: rank 0's lines, a bar where there is one, events."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fornax.cluster.files import ClusterFiles
from fornax.cluster.terminal import Terminal
from fornax.config.progress import Bar


@pytest.fixture
def files(tmp_path: Path) -> ClusterFiles:
    found = ClusterFiles(tmp_path)
    found.directory.mkdir()
    found.log(0).write_text("of an earlier launch\n")
    (tmp_path / "config.yaml").write_text("steps: 40\n")
    return found


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_without_a_bar_all_of_rank_0_is_shown_but_the_chatter_of_libraries(
    files: ClusterFiles, capsys: pytest.CaptureFixture[str]
):
    terminal = Terminal(files)
    add(files.log(0), "[Gloo] Rank 0 is connected to 1 peer ranks.\nkernel attention: native\nst")
    add(files.log(1), "rank 1\n")
    terminal.announce("epoch 1  forming: 2 hosts")
    add(files.log(0), "ep 5/40  loss 5.1\nI1122 23:58:04.42 service.cc:1] up\nthe end")
    terminal.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "kernel attention: native"
    assert shown[1].endswith("  epoch 1  forming: 2 hosts")
    assert shown[2:] == ["step 5/40  loss 5.1"]


def test_a_bar_stands_for_the_lines_of_progress(files: ClusterFiles):
    screen = io.StringIO()
    terminal = Terminal(files, Bar(Console(file=screen, width=120, force_terminal=True)))
    add(files.log(0), "kernel attention: native\nstep 5/40  loss 5.1\n")
    record = {"step": 5, "loss": 5.125, "tokens_per_second": 2000.0, "step_seconds": 2.0}
    add(files.run_dir / "metrics.jsonl", json.dumps(record) + "\n")
    terminal.tick(7)
    terminal.close()
    shown = screen.getvalue()
    assert "kernel attention: native" in shown
    assert "step 5/40" not in shown
    assert "loss 5.1250" in shown
    assert "2.0k tokens/s" in shown
    assert "5/40" in shown
    assert "1:10 left" in shown


def test_a_log_that_was_trimmed_is_read_on_at_its_end(
    files: ClusterFiles, capsys: pytest.CaptureFixture[str]
):
    terminal = Terminal(files)
    files.log(0).write_text("short\n")
    terminal.announce("now")
    add(files.log(0), "next\n")
    terminal.close()
    assert "next" in capsys.readouterr().err
