"""Schemes chosen by what they cost: what is measured, what is chosen, what is refused."""

import contextlib
import html
import io
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from fornax.cli.main import main
from fornax.config.errors import ConfigError, DataError
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    create_decoder,
    load_pretrained,
    save_pretrained,
)
from fornax.quant import quantize, search
from fornax.quant.leaves import KEEP
from fornax.quant.mixes import find_groups, rules_of
from fornax.quant.run import Source, open_source

TEXT = {"samples": 96, "length": 64}
SCHEMES = ("w8a16", "w4a16", "w3a16")


class Found(NamedTuple):
    out: Path
    said: str
    report: Mapping[str, Any]

    @property
    def search(self) -> Mapping[str, Any]:
        return self.report["search"]


def run(model: Path, texts: Path, out: Path, *words: str) -> int:
    text = ["--data", str(texts), *(w for k, v in TEXT.items() for w in (f"--{k}", str(v)))]
    return main(["quantize", str(model), "--out", str(out), *text, *words])


def page_of(out: Path) -> str:
    return (out / "quantization_report.html").read_text()


@pytest.fixture(scope="module")
def found(outliers: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The first MLP bears 4 bits badly, the rest well."""
    out = tmp_path_factory.mktemp("search") / "mixed"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        words = ("--search", "--max-loss", "0.6%", "--schemes", *SCHEMES)
        assert run(outliers, texts, out, *words) == 0
    report = json.loads((out / "quantization_report.json").read_text())
    return Found(out, said.getvalue(), report)


@pytest.mark.slow
def test_what_bears_few_bits_badly_keeps_more(found: Found) -> None:
    schemes = {
        name.removeprefix("model.layers."): note["scheme"]
        for name, note in found.report["quantized"].items()
    }
    sensitive = {s for name, s in schemes.items() if name.startswith("0.mlp")}
    others = {s for name, s in schemes.items() if not name.startswith("0.mlp")}
    assert sensitive == {"w8a16"}
    assert others <= {"w4a16", "w3a16"}
    assert found.report["held_out"]["loss"] < 1.006 * found.report["held_out"]["float_loss"]


@pytest.mark.slow
def test_the_frontier_goes_down_in_bytes_and_up_in_cost(found: Found) -> None:
    points = found.search["frontier"]
    assert points[0]["bytes"] == found.report["bytes_before"]
    assert points[0]["expected_kl"] == 0
    for before, after in itertools.pairwise(points):
        assert after["bytes"] < before["bytes"]
        assert after["expected_kl"] >= before["expected_kl"]
    measured = [point for point in points if point["measured"] is not None]
    assert len(measured) >= 4
    assert found.search["chosen"] in [point["step"] for point in measured]
    costs = [point["measured"]["kl"] for point in measured]
    assert costs == sorted(costs)
    for point in measured:  # costs of groups nearly add up
        assert point["measured"]["kl"] == pytest.approx(point["expected_kl"], rel=0.2)


@pytest.mark.slow
def test_the_chosen_mix_is_written_at_its_size(found: Found) -> None:
    chosen = found.search["frontier"][found.search["chosen"]]
    assert found.report["bytes_after"] == chosen["bytes"]
    larger = found.search["frontier"][found.search["chosen"] - 1]
    assert chosen["bytes"] < larger["bytes"]
    assert sorted(path.name for path in found.out.parent.iterdir()) == ["mixed"]


@pytest.mark.slow
def test_the_command_that_is_printed_makes_the_same_directory(found: Found, tmp_path: Path) -> None:
    (line,) = (line for line in found.said.splitlines() if line.startswith("  fornax quantize"))
    again(found.out, shlex.split(line), tmp_path)


def again(made: Path, words: Sequence[str], place: Path) -> None:
    """Run a command that was printed; it makes the same directory."""
    assert words[-2:] == ["--out", "DIR"]
    assert main([*words[1:-1], str(place / "again")]) == 0
    files = [file for file in made.iterdir() if not file.name.startswith("quantization_report")]
    assert any(file.suffix == ".safetensors" for file in files)
    for file in files:
        assert (place / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_the_page_makes_the_same_directory_by_text_in_other_groups(
    outliers: Path, texts: Path, tmp_path: Path
) -> None:
    """With less text than is asked for, of which a search holds back more rows."""
    few, out = tmp_path / "few.jsonl", tmp_path / "mixed"
    few.write_text("\n".join(texts.read_text().splitlines()[:2]))
    words = ("--search", "--max-loss", "50%", "--schemes", "w8a16", "w3a16-gptq")
    text = ("--data", str(few), "--samples", "1000", "--length", "64")
    others = ("--out", str(out), "--rules", "layers/1/=keep", "--group-size", "32")
    assert main(["quantize", str(outliers), *words, *text, *others]) == 0
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["group_size"] == 32
    assert report["samples"] < 200
    assert any(x["method"] == "gptq" for x in report["quantized"].values())
    (command,) = re.findall(r"<pre>(fornax.*?)</pre>", page_of(out), re.DOTALL)
    shell = f"fornax() {{ printf '%s\\0' \"$@\"; }}; {html.unescape(command)}"
    typed = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    again(out, ["fornax", *typed.stdout.split("\0")[:-1]], tmp_path)


@pytest.mark.slow
def test_the_page_shows_what_was_found(found: Found) -> None:
    page = page_of(found.out)
    assert "layers/0/mlp" in page
    assert "frontier, measured" in page
    assert str(found.out / "quantization_report.html") in found.said
    assert "w4a16 everywhere" in found.said


@pytest.mark.slow
def test_a_group_costs_what_the_whole_model_says(
    outliers: Path, texts: Path, tmp_path: Path
) -> None:
    report = search(
        outliers,
        tmp_path / "mixed",
        max_loss="50%",
        data=str(texts),
        schemes=["w3a16-gptq"],
        rules=["layers/0/=keep", "layers/1/mlp/=keep"],
        **TEXT,
    )
    assert report.search is not None
    (option,) = report.search["options"]
    assert (option["group"], option["scheme"]) == ("layers/1/attention", "w3a16-gptq")
    rows = open_source(outliers, str(texts), **TEXT, seed=0, choice=True).rows
    assert rows is not None
    tokens = rows.choice_NT[:, :-1]
    p, q = (
        np.asarray(jax.nn.log_softmax(load_pretrained(folder)(tokens)), np.float64)
        for folder in (outliers, tmp_path / "mixed")
    )
    wanted = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    assert option["kl"] == pytest.approx(wanted, rel=1e-3)
    assert option["saved"] == report.bytes_before - report.bytes_after


@pytest.mark.slow
def test_what_cannot_be_reached_is_said_with_the_best(
    outliers: Path, texts: Path, tmp_path: Path
) -> None:
    options = {"data": str(texts), "schemes": ["w3a16"], **TEXT}
    with pytest.raises(
        ConfigError, match=r"cannot be reached: the least that was found is -?\d"
    ) as e:
        search(outliers, tmp_path / "out", max_loss="0.0001%", **options)
    assert "w3a16" in str(e.value)
    assert not (tmp_path / "out").exists()
    options = {"data": str(texts), "scheme": "w3a16", **TEXT}
    with pytest.raises(ConfigError, match=r"raises the loss .* nothing was written"):
        quantize(outliers, tmp_path / "out", max_loss="0.0001%", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no scheme is named; give --scheme NAME, or --search"),
        (["--scheme", "w8a16", "--search"], "two answers to one question"),
        (["--search"], "what the loss may rise by; give --max-loss"),
        (["--search", "--max-loss", "0.5"], "max_loss='0.5' must be a share"),
        (["--search", "--max-loss", "1%", "--schemes", "w5"], "there is no scheme 'w5'"),
        (["--search", "--max-loss", "1%", "--rules", "layers/=keep"], "nothing is left"),
        (["--scheme", "w8a16", "--schemes", "w4a16"], "is what --search chooses from"),
    ],
)
def test_what_does_not_fit_is_refused(
    words: list[str],
    message: str,
    model: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(model, texts, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_text_is_needed(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(model), "--out", str(tmp_path / "out"), "--max-loss", "1%"]
    assert main([*words, "--search"]) == 2
    assert "--search needs text to measure on; give --data FILE" in capsys.readouterr().err
    assert main([*words, "--scheme", "w8a16"]) == 2
    assert "max_loss=1% needs text" in capsys.readouterr().err
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "import json\n" * 8}) + "\n")
    with pytest.raises(DataError, match="three rows of 64 at least, two of them held out"):
        search(model, tmp_path / "out", max_loss="1%", data=str(tmp_path / "few.jsonl"), **TEXT)


MODELS = {
    "dense": DecoderConfig(
        vocab_size=97, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4
    ),
    # Groups of 128 do not divide the inputs of all but `down`.
    "narrow": DecoderConfig(
        vocab_size=97, hidden_size=96, intermediate_size=256, num_layers=3, num_heads=3
    ),
    "experts": DecoderConfig(
        vocab_size=97,
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        experts=ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=128),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp(request.param)
    save_pretrained(create_decoder(MODELS[request.param]), folder / "m")
    return open_source(folder / "m", None, samples=1, length=2, seed=0)


@pytest.mark.parametrize("rules", [(), ("layers/1/attention/o=w3a16",)])
def test_rules_give_each_matrix_the_scheme_of_its_group(
    opened: Source, rules: tuple[str, ...]
) -> None:
    if rules and opened.stored.model.config.hidden_size % 128:
        pytest.skip("this rule does not fit")
    schemes = ("w8a16", "w4a16", "fp8")
    groups = find_groups(opened, schemes, rules)
    draw = np.random.default_rng(0)
    for _ in range(30):
        mix = {
            name: str(draw.choice([*group.leaves]))
            for name, group in groups.items()
            if draw.random() < 0.7
        }
        if not mix:
            continue
        scheme, made = rules_of(opened, groups, mix, rules)
        assert made[: len(rules)] == rules
        found = {leaf.tensor.name: leaf for leaf in opened.assigned(scheme, made)}
        for name, group in groups.items():
            own = {x.tensor.name for leaves in group.leaves.values() for x in leaves}
            wanted = dict.fromkeys(own, KEEP)
            if name in mix:
                wanted |= {x.tensor.name: mix[name] for x in group.leaves[mix[name]]}
            for tensor, each in wanted.items():
                got = found[tensor].scheme
                assert (KEEP if got is None else got.name) == each, (tensor, scheme, made)
        fixed = [
            leaf for leaf in found.values() if leaf.paths[:1] == ("layers/1/attention/o/kernel",)
        ]
        if rules:
            assert [leaf.scheme and leaf.scheme.name for leaf in fixed] == ["w3a16"]
        assert all(
            leaf.scheme is None for leaf in found.values() if "router" in "".join(leaf.paths)
        )
