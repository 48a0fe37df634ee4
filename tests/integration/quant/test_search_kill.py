"""`kill -9` in the middle of a search, then the same command: what was measured is not again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.quant.conftest import kill_after

from fornax.quant import search

pytestmark = [pytest.mark.fault, pytest.mark.slow]
MARK = 7.25
OPTIONS = {"max_loss": "400%", "length": 64, "samples": 4}


@pytest.fixture(scope="module")
def model(write_model: Callable[[int, int], Path]) -> Path:
    return write_model(256, 2)


def test_a_killed_search_goes_on_with_what_it_measured(model: Path, tmp_path: Path) -> None:
    data, schemes = str(model.parent / "texts.jsonl"), ["w8a16", "w4a16"]
    out, folder = tmp_path / "out", tmp_path / ".out.searching"
    flags = [w for k, v in OPTIONS.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    words = ["quantize", str(model), "--search", "--schemes", *schemes, "--data", data, *flags]
    # Eight lines are groups alone; the ninth is the first mix.
    kill_after(9, [*words, "--out", str(out)], folder / "journal.jsonl")
    assert not out.exists()
    first, *rest = (folder / "journal.jsonl").read_text().splitlines()
    marked = json.dumps({**json.loads(first), "kl": MARK})  # measured again it would be another
    (folder / "journal.jsonl").write_text("\n".join([marked, *rest]) + "\n")
    report = search(model, out, data=data, schemes=schemes, **OPTIONS)
    whole = search(model, tmp_path / "whole", data=data, schemes=schemes, **OPTIONS)
    assert report.search is not None
    assert whole.search is not None
    ((first, *rest), (other, *others)) = report.search["options"], whole.search["options"]
    assert first == {**other, "kl": MARK}
    assert rest == others
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
