"""What is shown: a line an interval away from a terminal, figures a person can read."""

import io

from rich.console import Console

from fornax.config.progress import Bar, Lines

RECORD = {"loss": 3.14159, "tokens_per_second": 12_345.0, "mfu": 0.42}


def test_lines_come_once_an_interval_and_at_the_end():
    stream = io.StringIO()
    lines = Lines(stream, interval=3600)
    lines.start(0, 100, "tokens")
    for step in range(1, 11):
        lines.update({**RECORD, "step": step}, seconds_left=None if step == 1 else 3725)
    lines.close()
    assert stream.getvalue().splitlines() == [
        "step 1/100  loss 3.1416  12.3k tokens/s  mfu 42.0%",
        "step 10/100  loss 3.1416  12.3k tokens/s  mfu 42.0%  1:02:05 left",
    ]


def test_every_line_comes_without_an_interval():
    stream = io.StringIO()
    lines = Lines(stream, interval=0)
    lines.start(0, 3, "rows")
    for step in range(1, 4):
        record = {"step": step, "loss": 1.0, "reward": 0.5, "rows_per_second": 7.0}
        lines.update(record, seconds_left=5)
    lines.close()
    assert (
        stream.getvalue().splitlines()[-1]
        == "step 3/3  loss 1.0000  reward 0.5000  7 rows/s  0:05 left"
    )
    assert len(stream.getvalue().splitlines()) == 3


def test_a_bar_shows_figures_and_leaves_the_terminal():
    stream = io.StringIO()
    bar = Bar(Console(file=stream, force_terminal=True, width=120))
    bar.start(0, 4, "tokens")
    bar.log("[not markup] said")
    bar.update({**RECORD, "step": 4}, seconds_left=0)
    bar.close()
    shown = stream.getvalue()
    assert "[not markup] said" in shown
    assert "4/4" in shown
    assert "12.3k tokens/s" in shown
    assert shown.rstrip("\n").endswith("\x1b[?25h")  # the cursor is back
