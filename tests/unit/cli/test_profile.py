"""`fornax profile show`: tables, figures, and what it refuses."""

import json

import pytest
from tests.unit.profile.spaces import MS, Event, space, write

from fornax.cli.main import main as fornax

STATS = {"hlo_module": "jit_step", "program_id": 1, "device_ordinal": 0}


@pytest.fixture
def directory(tmp_path):
    """Three steps of 10 ms: 2 ms of input, 6 of a product, 1 of an exchange."""
    host, device = [], []
    for number in range(3):
        at = 10 * MS * number
        host.append(Event("train", at, 10 * MS, {"step_num": 20 + number}))
        host.append(Event("input/read", at, 2 * MS))
        for name, begin, length in (("dot.1", 2, 6), ("all-reduce.2", 8, 1)):
            stats = {**STATS, "hlo_op": name, "run_id": number}
            device.append(Event(name, at + begin * MS, length * MS, stats))
    write(space({"/host:CPU": {"python": host, "tf_XLAEigen/5": device}}), tmp_path)
    return tmp_path


def lines(text: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}


def test_show_prints_causes_operations_input_and_threads(directory, capsys):
    assert fornax(["profile", "show", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "3 steps of train (20 to 22)" in text
    found = lines(text)
    assert found["compute"][:3] == ["6.00", "ms", "60.0%"]
    assert found["input"][:3] == ["2.00", "ms", "20.0%"]
    assert found["step"][:2] == ["10.0", "ms"]
    assert found["dot.1"][:4] == ["3", "18.0", "ms", "85.7%"]
    assert found["read"] == ["3", "6.00", "ms", "6.00", "ms"]
    assert max(map(len, text.splitlines())) <= 100 or "note:" in text


def test_show_prints_requests_and_batches(tmp_path, capsys):
    facts = {"sequences": 3, "tokens": 3, "bucket": 4, "steps": 2}
    limits = {"most_sequences": 4, "most_tokens": 12}
    events = [
        Event("request/queued", MS, 1, {"request": "a", "tokens": 9}),
        Event("request/started", 3 * MS, 1, {"request": "a"}),
        Event("request/first token", 8 * MS, 1, {"request": "a"}),
        Event("engine/decode", 9 * MS, MS, facts | limits),
        Event("request/finished", 28 * MS, 1, {"request": "a", "tokens": 6}),
        Event("request/queued", 29 * MS, 1, {"request": "b", "tokens": 9}),
    ]
    write(space({"/host:CPU": {"python": events}}), tmp_path)
    assert fornax(["profile", "show", str(tmp_path), "--rows", "1"]) == 0
    text = capsys.readouterr().out
    found = lines(text)
    way = ["1.00", "ms", "2.00", "ms", "5.00", "ms", "20.0", "ms"]
    assert found["a"] == [*way, "9", "6", "4.00", "ms", "finished"]
    assert found["decode"] == ["1", "2", "3.0", "75.0%", "3.0", "25.0%", "75.0%"]
    assert "and 1 more requests (--rows)" in text
    assert max(map(len, text.splitlines())) <= 100
    target = tmp_path / "figures.json"
    assert fornax(["profile", "show", str(tmp_path), "--json", str(target)]) == 0
    told = json.loads(target.read_text())
    assert [each["ending"] for each in told["requests"]] == ["finished", "open"]
    assert told["batches"][0]["most_rows"] == 12


def test_show_groups_and_chooses_steps(directory, capsys):
    assert fornax(["profile", "show", str(directory), "--by", "class", "--steps", "21..22"]) == 0
    assert lines(capsys.readouterr().out)["exchange"][:3] in (
        ["1.00", "ms", "10.0%"],
        ["2", "2.00", "ms"],
    )


def test_show_writes_every_figure(directory, tmp_path, capsys):
    target = tmp_path / "out" / "figures.json"
    assert fornax(["profile", "show", str(directory), "--json", str(target)]) == 0
    told = json.loads(target.read_text())
    assert [step["number"] for step in told["steps"]] == [20, 21, 22]
    assert all(sum(step["causes_ns"].values()) == 10 * MS for step in told["steps"])
    (dot, reduce) = told["rows"]
    assert (dot["key"], dot["seconds_of_steps"]) == ("dot.1", pytest.approx([0.006] * 3))
    assert reduce["category"] == "exchange"
    assert told["input"][0]["waited_seconds"] == pytest.approx(0.006)
    assert told["info"]["platform"] == "cpu"


def test_show_writes_a_page(directory, tmp_path, capsys):
    target = tmp_path / "page.html"
    assert fornax(["profile", "show", str(directory), "--html", str(target)]) == 0
    assert "all-reduce.2" in target.read_text()
    assert capsys.readouterr().out.splitlines()[-1] == str(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere holds no capture"),
        (["{}", "--by", "line"], "op, source, module, class"),
        (["{}", "--steps", "9..12"], "step 9 is not in this capture; it holds steps 20 to 22"),
        (["{}", "--steps", "5..3"], "holds no step"),
        (["{}", "--steps", "five"], "use two numbers such as 20..25"),
        (["{}", "--rows", "0"], "use at least 1"),
        (["{}", "--json", "/proc/figures.json"], "cannot write the figures"),
        (["{}", "--html", "/proc/page.html"], "cannot write the page"),
        ([], "DIR"),
    ],
)
def test_show_refuses_in_one_paragraph(directory, capsys, arguments, message):
    words = [word.format(directory) for word in arguments]
    assert fornax(["profile", "show", *words]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
