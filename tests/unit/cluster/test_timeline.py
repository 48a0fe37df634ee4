"""The picture of a run: what is drawn is where the record and the events say."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from fornax.cluster.timeline import draw_timeline, write_timeline
from fornax.config import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
STEP, COMPILE = "#2f9e74", "#7c5cd6"


@pytest.fixture(params=[2, 64])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A run of 100 s, of which 20 compile and 70 are steps; rank 1 is killed after 60."""
    ranks = request.param
    (tmp_path / "cluster").mkdir()
    lines = [
        {"attempt": 1, "start_step": 0, "time": 20.0},
        _line(60.0, 20, [["compile", 20.0], ["step", 40.0]]),
        {"attempt": 2, "start_step": 20, "time": 70.0},
        _line(100.0, 35, [["step", 30.0]], attempt=2),
    ]
    fault = {"rank": 1, "kind": "killed", "since": 55.0, "why": ""}
    events = [
        {"time": 0.0, "epoch": 1, "state": "forming", "free": 0},
        {"time": 0.0, "epoch": 1, "state": "running", "step": 1},
        {"time": 60.0, "epoch": 1, "drill": "kill", "rank": 1, "step": 20},
        {"time": 60.0, "epoch": 1, "state": "suspect", **fault},
        {"time": 61.0, "epoch": 1, "state": "teardown", **fault},
        {"time": 62.0, "epoch": 2, "state": "forming", "free": 1},
        {"time": 70.0, "epoch": 2, "state": "running", "step": 21},
        {"time": 80.0, "epoch": 2, "drill": "slow", "rank": 0, "step": 25},
        {"time": 85.0, "epoch": 2, "state": "running", "slow": 0, "evict": False},
        {"time": 100.0, "epoch": 2, "state": "ended"},
    ]
    metrics = [{"step": n, "time": 20.0 + 2 * n, "loss": 5 - n / 10} for n in range(1, 36)]
    _write(tmp_path / "events.jsonl", events)
    _write(tmp_path / "metrics.jsonl", metrics)
    _write(tmp_path / "goodput.jsonl", lines)
    for rank in range(1, ranks):
        _write(tmp_path / "cluster" / f"rank-{rank}.goodput.jsonl", lines)
    return tmp_path, ranks


def _line(time: float, step: int, spans: list[list], attempt: int = 1) -> dict:
    return {
        "attempt": attempt,
        "step": step,
        "time": time,
        "seconds": dict(spans),
        "spans": spans,
    }


def _write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_every_rank_has_a_lane_with_its_phases_to_scale(run: tuple[Path, int]):
    folder, ranks = run
    drawn = ET.fromstring(draw_timeline(folder))
    rects = [r.attrib for r in drawn.iter(f"{SVG}rect")]
    lanes = [r for r in rects if r.get("class") == "lane"]
    assert len(lanes) == ranks
    assert len({r["y"] for r in lanes}) == ranks
    wide = float(lanes[0]["width"])
    for lane in lanes:
        pieces = [r for r in rects if r["y"] == lane["y"] and "fill" in r]
        lengths = dict.fromkeys((STEP, COMPILE), 0.0)
        for piece in pieces:
            lengths[piece["fill"]] = lengths.get(piece["fill"], 0.0) + float(piece["width"])
        assert lengths[STEP] == pytest.approx(0.7 * wide, abs=1)
        assert lengths[COMPILE] == pytest.approx(0.2 * wide, abs=1)
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "1 kill rank 1" in texts
    assert "2 slow rank 0" in texts
    assert "70.0%" in texts
    assert sum(str(text).startswith("rank ") for text in texts) >= min(ranks, 20)
    marks = [r for r in drawn.iter(f"{SVG}circle") if r.get("class") == "mark"]
    for mark, at in zip(marks, (0.6, 0.8), strict=True):
        assert float(mark.attrib["cx"]) == pytest.approx(float(lanes[0]["x"]) + at * wide, abs=0.1)
    assert len(list(drawn.iter(f"{SVG}polyline"))) == 2  # losses before and after the first fault


def test_the_page_holds_the_picture_and_the_faults(run: tuple[Path, int]):
    folder, _ = run
    text = write_timeline(folder).read_text()
    assert (folder / "timeline.html").read_text() == text
    assert all(said in text for said in ("<svg", "kill rank 1", "killed", "10.0 s", "slow rank 0"))
    assert "src=" not in text  # it fetches nothing
    assert write_timeline(folder, folder / "p.svg").read_text() == draw_timeline(folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no record of a run"):
        draw_timeline(tmp_path)
