"""`fornax plan`: the report, its files, and one paragraph for everything that can be wrong."""

import json
from pathlib import Path

import pytest

from fornax.cli.main import main
from fornax.config import load
from fornax.train import TrainConfig

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = ["plan", "--config", str(RECIPES / "qwen3-0.6b.yaml")]
PREDICTED = [*SMALL, "--topology", "v5e:2x4", "--predicted"]


def test_a_plan_is_printed(capsys):
    assert main(PREDICTED) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3-0.6b on v5e:2x4: 8 chips, 1 host\nPredicted from the hardware")
    for part in ("MFU", "fits:", "parameters", "Work of a step", "Communication of a step"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 100


def test_keys_of_the_config_are_flags(capsys):
    assert main([*PREDICTED, "--seq-len", "2048", "--mesh.tensor", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "32 rows of 2,048 tokens" in out
    assert "mesh fsdp=4 tensor=2" in out


def test_gpus_are_predicted_without_being_asked(capsys):
    assert main([*SMALL, "--topology", "h100:8"]) == 0
    assert "Predicted from the hardware table of GPUs" in capsys.readouterr().out


def test_files_and_prices(capsys, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nchips: {v5e: 1.5}\n")
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "html", "yaml")}
    words = ["--json", str(files["json"]), "--html", str(files["html"]), "--write"]
    assert main([*PREDICTED, "--price", str(prices), *words, str(files["yaml"])]) == 0
    out = capsys.readouterr().out
    assert "288 EUR per day" in out
    assert all(str(path) in out for path in files.values())
    found = json.loads(files["json"].read_text())
    assert found["money"]["per_day"] == 288.0
    assert found["summary"]["fits"] is True
    assert "<h2>Does it fit?</h2>" in files["html"].read_text()
    assert load(TrainConfig, file=files["yaml"]) == load(
        TrainConfig, file=RECIPES / "qwen3-0.6b.yaml"
    )


def test_a_plan_that_does_not_fit_is_printed_and_exits_with_2(capsys):
    words = ["plan", "--config", str(RECIPES / "qwen3-8b.yaml"), "--topology", "v5e:8x8"]
    assert main([*words, "--predicted"]) == 2
    captured = capsys.readouterr()
    assert "DOES NOT FIT" in captured.out
    assert captured.err.startswith("error: qwen3-8b does not fit v5e:8x8: the train_step needs")
    assert captured.err.count("\n") == 1
    assert all(f"({number})" in captured.err for number in (1, 2, 3))


@pytest.mark.exhaustive
def test_a_search_finds_a_plan_and_writes_it(capsys, tmp_path):
    best = tmp_path / "best.yaml"
    words = ["plan", "--config", str(RECIPES / "qwen3-8b.yaml"), "--topology", "v5e:8x8"]
    assert main([*words, "--predicted", "--search", "--write", str(best)]) == 0
    out = capsys.readouterr().out
    assert "plans considered" in out
    assert "1. " in out
    assert load(TrainConfig, file=best) != load(TrainConfig, file=RECIPES / "qwen3-8b.yaml")
    capsys.readouterr()
    assert main(["plan", "--config", str(best), "--topology", "v5e:8x8", "--predicted"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "fornax plan needs a config; name one with --config FILE"),
        (["--config", "none.yaml", "--topology", "v5e:2x4"], "the config file none.yaml cannot be"),
        ([*SMALL[1:], "--topology", "v5p:5x5"], "topology 'v5p:5x5': there is no v5p slice of 5x5"),
        ([*SMALL[1:], "--topology", "v9:4"], "topology 'v9:4': chip 'v9' is not known"),
        ([*PREDICTED[1:], "--mesh.tensor", "3"], "the mesh fsdp=-1 x tensor=3 needs a multiple"),
        ([*PREDICTED[1:], "--batch-size", "100"], "batch_size=100 does not divide into 8 virtual"),
        (
            [*PREDICTED[1:], "--price", "none.yaml"],
            "price=none.yaml is neither a number nor a file",
        ),
        ([*PREDICTED[1:], "--programs", "eval"], "closed forms know the training step, not eval"),
        ([*PREDICTED[1:], "--topolgy", "x"], "--topolgy is neither a flag nor a key"),
        (["srve"], "srve is not a command of fornax plan; did you mean serve?"),
    ],
)
def test_what_is_wrong_is_one_paragraph(capsys, words, message):
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_price_that_is_missing_is_said_before_anything_is_compiled(capsys, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("chips: {v5p: 1.5}\n")
    assert main([*SMALL, "--topology", "v5e:2x4", "--price", str(prices)]) == 2
    assert "no price for v5e" in capsys.readouterr().err


GOODPUT = ["plan", "goodput", "--hosts", "128", "--step", "4s", "--state", "300GB"]
QUICK = [*GOODPUT, "--seeds", "2", "--horizon", "5d"]


def test_a_goodput_plan_names_what_it_assumed_and_writes_every_figure(capsys, tmp_path):
    file = tmp_path / "goodput.json"
    assert main([*QUICK, "--memory", "20GB/s", "--spares", "5", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("128 hosts in 2 slices, a step of 4.00 s, a state of 300 GB\nSimulated")
    for part in ("memory: 20GB/s (given)", "disk: 270MB/s (measured on a CPU", "5 spare hosts"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 100
    found = json.loads(file.read_text())
    assert found["run"]["memory_rate"] == 20e9
    assert found["chosen"]["policy"]["spares"] == 5
    assert abs(sum(found["chosen"]["causes"].values()) - 1) < 1e-9


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["plan", "goodput", "--hosts", "4"], "--hosts 4096 --step 12s --state 1.2TB"),
        ([*GOODPUT, "--mtbf", "25000"], "write a number and its unit, one of ms, s, min, h, d"),
        ([*GOODPUT, "--store", "5Gb/s"], "GB/s"),
        ([*GOODPUT, "--slice-hosts", "100"], "give a divisor of the hosts"),
        ([*GOODPUT, "--tiers", "memory,tape"], "memory, peer, disk, store"),
        ([*GOODPUT, "--tiers", "memory,peer"], "the store belongs to them"),
        ([*GOODPUT, "--spares=-1"], "give 0 or more"),
        ([*GOODPUT, "--seeds", "1"], "simulate 2 or more"),
        ([*GOODPUT, "--mtbf", "25s"], "simulate less with --horizon"),
    ],
)
def test_a_goodput_plan_that_cannot_be_made_says_how_it_can(capsys, words, fix):
    assert main(words) == 2
    assert fix in " ".join(capsys.readouterr().err.split())
