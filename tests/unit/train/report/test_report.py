"""The report is one self-contained page, made from the run's files, that shows what they hold."""

import json
import re
from html.parser import HTMLParser

import pytest

from fornax.config.errors import ConfigError
from fornax.pages import bars, lines, table
from fornax.train.report import cost_line, duration, write


class _Checker(HTMLParser):
    """Collects tags that are left open, and addresses that the page would fetch."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "img", "path", "use", "rect"):
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "srcset") and v]
        self.fetched += [
            v for k, v in attrs if k.endswith("href") and v and not v.startswith(("#", "data:"))
        ]

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag
        else:
            assert tag in ("path", "use", "rect")

    def handle_data(self, data):
        self.text.append(data)


def _check(html: str) -> str:
    checker = _Checker()
    checker.feed(html)
    assert checker.open == []
    assert checker.fetched == []
    return "".join(checker.text)


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "my <run>"
    run.mkdir()
    records = [
        {"step": s, "time": float(s), "loss": 5 - s / 100, "grad_norm": 1.0, "learning_rate": 1e-3,
         "tokens_per_second": 4321.0, **({"eval/loss": 4.5} if s % 50 == 0 else {})}
        for s in range(1, 101)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    ledger = [
        {"attempt": 1, "start_step": 0, "time": 0},
        {"attempt": 1, "step": 100, "time": 0, "seconds": {"step": 75.0, "compile": 25.0}},
    ]
    (run / "goodput.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ledger))
    (run / "config.yaml").write_text("steps: 100 # <script>\n")
    return run


def test_a_price_says_what_the_run_cost(run_dir):
    """100 s of 18 chips are half a chip-hour, for 2 million tokens; a quarter was compilation."""
    assert cost_line(run_dir) is None
    ledger = run_dir / "goodput.jsonl"
    first, rest = ledger.read_text().split("\n", 1)
    price = {"chips": 18, "chip_hour": 5.0, "currency": "USD"}
    ledger.write_text(json.dumps({**json.loads(first), **price}) + "\n" + rest)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss"', '"tokens": 2000000, "loss"'))
    words = "2.5 USD, for 0.5 chip-hours at 5 USD; 1.25 USD per million tokens; 25 % of it outside"
    assert words in str(cost_line(run_dir))
    assert words in _check(write(run_dir).read_text())


def test_the_page_holds_curves_time_and_config_and_fetches_nothing(run_dir):
    page = write(run_dir).read_text()
    text = _check(page)
    assert {"Loss", "Learning rate", "Gradient norm", "Throughput"} <= set(
        re.findall(r'aria-label="([^"]+)"', page)
    )
    assert "held out" in text
    assert "75 % of 1 min 40 s" in text
    assert "<script>" not in page
    assert "my &lt;run&gt;" in page


def test_experts_have_a_grid_of_their_load(run_dir):
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record |= {"expert_load_max": 2.5, "expert_load_min": 0.0, "balance_loss": 2.0}
        record |= {"router_entropy": 1.1, "router_z_loss": 0.3}
    records[-1]["expert_tokens"] = [[0, 5, 3, 0], [2, 2, 2, 2]]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    page = write(run_dir).read_text()
    text = _check(page)
    assert "2 of 8 experts had no token" in text
    assert "Tokens of each expert at step 100" in page
    assert "Entropy of a token's scores, nats" in text


def test_dropped_tokens_have_a_grid_beside_the_load(run_dir):
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record |= {"expert_load_max": 2.5, "expert_load_min": 0.0, "balance_loss": 2.0}
        record |= {"router_entropy": 1.1, "router_z_loss": 0.3, "expert_dropped": 0.25}
    records[-1]["expert_tokens"] = [[0, 6, 2, 0], [2, 2, 2, 2]]
    records[-1]["expert_tokens_dropped"] = [[0, 4, 0, 0], [0, 0, 0, 0]]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    page = write(run_dir).read_text()
    text = _check(page)
    assert "They had no room for 25.0% of what tokens chose" in text
    assert "Tokens of each expert that it had no room for at step 100" in page
    assert "Share of tokens&#39; choices that were dropped" in page


def test_the_page_is_the_same_for_the_same_run(run_dir):
    assert write(run_dir).read_bytes() == write(run_dir).read_bytes()


def test_a_directory_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no steps"):
        write(tmp_path)


def test_a_page_that_cannot_be_written_leaves_the_old_one(run_dir):
    old = write(run_dir).read_text()
    (run_dir / "report.html").unlink()
    (run_dir / "report.html").mkdir()
    with pytest.raises(ConfigError, match="cannot write the report"):
        write(run_dir)
    (run_dir / "report.html").rmdir()
    assert write(run_dir).read_text() == old


def test_cells_and_labels_are_escaped_and_numbers_align():
    html = str(table(("name", "value"), [("<b>", "1.5"), ("&", "—")]))
    assert "&lt;b&gt;" in html
    assert html.count('class="n"') == 3
    _check(html)
    _check(str(bars("a < b", [("x & y", 2.0)], highlight="x & y")))
    _check(str(lines("empty", [("none", [], [])], log=True)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")],
)
def test_durations_read_as_a_person_writes_them(seconds, text):
    assert duration(seconds) == text


def test_a_curve_of_zeros_needs_no_logarithm() -> None:
    assert "Gradient norm" in lines("Gradient norm", [("", [1, 2], [0.0, 0.0])], log=True)
