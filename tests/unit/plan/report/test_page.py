"""The page is one file that fetches nothing, and shows what the plan says."""

import re

import pytest

from fornax.config import ConfigError
from fornax.plan.report import write_page


@pytest.fixture
def html(make_plan, tmp_path):
    path = write_page(make_plan(name="a <b> & c"), tmp_path / "deep" / "plan.html")
    return path.read_text(encoding="utf-8")


def test_nothing_is_fetched(html):
    assert not re.search(r'\b(?:src|href)="(?!#)', html)
    assert "@import" not in html
    assert "url(" not in html.replace("url(#", "")


def test_names_are_escaped(html):
    assert "<h1>a &lt;b&gt; &amp; c on v5p:4x4x4</h1>" in html
    assert "<b> & c" not in html


def test_both_pictures_are_there_with_their_names(html):
    assert 'aria-label="Memory of one chip, GiB"' in html
    assert 'aria-label="Roofline of one chip"' in html
    for text in ("activations 30.0 GiB", "usable 95.0", "matmul 73%", "459 TFLOP/s in bfloat16"):
        assert text in html


def test_every_section_is_there(html):
    for title in (
        "Does it fit?",
        "What is the work?",
        "What is exchanged?",
        "Large arrays that every chip holds whole",
        "Exchanges that no rule asks for",
        "What a search found",
        "What would run, and on what",
        "Programs",
        "Notes",
    ):
        assert f"<h2>{title}</h2>" in html


def test_a_plan_that_does_not_fit_names_the_changes(make_plan, tmp_path):
    html = write_page(make_plan(fits=False), tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "DOES NOT FIT" in html
    assert "--accumulate 4" in html


def test_a_place_that_cannot_be_written_is_named(make_plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        write_page(make_plan(), tmp_path / "file" / "plan.html")
