"""`fornax convert`: what reaches the conversion, and what is said of its result."""

from pathlib import Path

import pytest

import fornax.train
from fornax.cli.main import main
from fornax.train import Parity


@pytest.fixture
def calls(monkeypatch):
    """Conversions that the command asked for, instead of running them."""
    made = []

    def convert(source, destination, **options):
        made.append((source, destination, options))
        return Parity(
            source=str(source),
            destination=str(destination),
            family="llama",
            parameters=63712,
            dtype="bfloat16",
            prompts="text",
            tokens=1327,
            modules_left_out=0,
            max_abs_difference=0.00134,
            max_abs_logit=12.5,
            same_top_token=0.994,
        )

    monkeypatch.setattr(fornax.train, "convert", convert)
    return made


def test_the_arguments_reach_the_conversion(calls):
    words = ["--dtype", "bfloat16", "--step", "7", "--tokenizer", "tok", "--overwrite"]
    assert main(["convert", "runs/a", "--out", "models/a", *words]) == 0
    options = {"dtype": "bfloat16", "step": 7, "tokenizer": Path("tok"), "overwrite": True}
    options |= {"merge_lora": False, "mtp": False}
    assert calls == [(Path("runs/a"), Path("models/a"), options)]


def test_what_is_left_out_stays_with_the_conversion(calls):
    main(["convert", "a", "--out", "b"])
    options = {"dtype": None, "step": None, "tokenizer": None, "overwrite": False}
    options |= {"merge_lora": False, "mtp": False}
    assert calls == [(Path("a"), Path("b"), options)]


def test_the_difference_of_the_logits_is_said(calls, capsys):
    main(["convert", "a", "--out", "b"])
    assert capsys.readouterr().out == (
        "b: 63,712 parameters in bfloat16\n"
        "largest logit difference 1.34e-03 (largest logit 12.5) over 1,327 tokens of text; the "
        "same token comes first at 99.4% of positions\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "fornax convert needs --out; see fornax convert --help"),
        (["a", "b"], "'b' is a word too many for fornax convert, which takes SOURCE"),
        (["a", "--out", "b", "--dtype", "int8"], "dtype=int8 (--dtype on the command line)"),
    ],
)
def test_what_cannot_be_is_refused(calls, capsys, words, message):
    assert main(["convert", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not calls


def test_a_source_that_is_no_model_is_refused(capsys, tmp_path):
    assert main(["convert", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "is neither a run directory with checkpoints nor" in capsys.readouterr().err
    (tmp_path / "refused").mkdir()  # a run that stopped before its first checkpoint
    for name in ("none", "refused"):
        words = [str(tmp_path / name), "--merge-lora", "--out", str(tmp_path / "out")]
        assert main(["convert", *words]) == 2
        assert "is neither a run directory with checkpoints nor" in capsys.readouterr().err
