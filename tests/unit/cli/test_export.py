"""`fornax export`: what reaches the export, what is printed, and the exit codes."""

import json
import textwrap

import pytest

import fornax.train
from fornax import export
from fornax.cli.main import main
from fornax.export.manifest import Manifest

OWN = """
    import numpy as np
    from fornax.export import Spec

    def scale(params, x):
        return {"y": x * params["w"] * TIMES}

    def make():
        return {
            "functions": {"scale": scale},
            "params": {"w": np.ones(3, np.float32)},
            "inputs": {"scale": {"x": Spec((3,), "float32")}},
            "platforms": ["cpu"],
            "check": False,
        }

    def short():
        return {"functions": {}}

    def odd():
        return {**make(), "bucket": {}}

    def lists():
        return [make()]

    def broken():
        return {}["x"]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own_model.py"
    path.write_text("TIMES = 2\n" + textwrap.dedent(OWN), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundle(own):
    out = own.parent / "bundle"
    assert main(["export", "--function", f"{own}:make", "--out", str(out)]) == 0
    return out


@pytest.fixture
def calls(monkeypatch):
    """Exports of models that the command asked for, instead of running them."""
    made = []

    def export_model(model, out, **options):
        made.append((str(model), str(out), options))
        nothing = {key: {} for key in ("versions", "functions", "weights", "metadata", "files")}
        return Manifest(platforms=("cpu",), executables=(), **nothing)

    monkeypatch.setattr(fornax.train, "export_model", export_model)
    return made


def test_the_arguments_reach_the_export_of_a_model(calls):
    words = "--function score embedding --batch 1 4 --length 32 --pooling last --overwrite"
    assert main(["export", "--model", "hf", "--out", "lm/1", *words.split()]) == 0
    assert main(["export", "--model", "hf", "--out", "lm/1", "--platforms", "tpu"]) == 0
    first = {"functions": ("score", "embedding"), "batch": (1, 4), "lengths": (32,)}
    assert calls == [
        ("hf", "lm/1", {**first, "pooling": "last", "overwrite": True}),
        ("hf", "lm/1", {"functions": ("logits",), "platforms": ("tpu",)}),
    ]


def test_a_function_of_the_users_own_is_exported(bundle):
    assert export.load(bundle)["scale"](x=[1.0, 2.0, 3.0])["y"].tolist() == [2, 4, 6]


def test_a_bundle_is_printed_whole(bundle, capsys):
    assert main(["export", "--inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert "function scale (the default)" in text
    assert main(["export", "--inspect", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(file["sha256"] in text for file in found["files"].values())


def test_two_bundles_are_compared_with_an_exit_code(bundle, own, tmp_path, capsys):
    assert main(["export", "--diff", str(bundle), str(bundle)]) == 0
    changed = tmp_path / "own_model.py"
    changed.write_text(own.read_text().replace("TIMES = 2", "TIMES = 3"))
    assert main(["export", "--function", f"{changed}:make", "--out", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["export", "--diff", str(bundle), str(tmp_path / "b"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"]
    assert "dense<3.000000e+00>" in "".join(found["graphs"]["scale.cpu"]["changes"])
    assert main(["export", "--diff", str(bundle), str(tmp_path / "lost")]) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give one of these"),
        (["--inspect", "a", "--diff", "a", "b"], "give one of these"),
        (["--inspect", "a", "--out", "b"], "--out has no effect with --inspect"),
        (["--model", "hf"], "name the bundle to make with --out"),
        (["--model", "hf", "--out", "x", "--json"], "--json is for --inspect and --diff"),
        (["--model", "hf", "--out", "x", "--pooling", "last"], "--pooling is for the function"),
        (["--model", "hf", "--out", "x", "--function", "f.py:f"], "brings weights of its own"),
        (["--function", "logits", "--out", "x"], "for functions of a model add --model"),
        (["--function", "f.py:f", "--out", "x", "--batch", "1"], "--batch is for a model"),
        (["--function", "f.py:f", "--out", "x"], "there is no file f.py"),
        (["--model", "lost", "--out", "x"], "neither a run directory"),
    ],
)
def test_what_does_not_fit_is_refused(words, reason, capsys):
    assert main(["export", *words]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("short", "returned lacks 'params'"),
        ("odd", "returned has 'bucket'"),
        ("lists", "returned a list"),
        ("broken", "raises KeyError at"),
        ("scale", "takes arguments (params, x); name a function that takes none"),
        ("mak", "did you mean make?"),
    ],
)
def test_what_is_wrong_with_the_users_function_is_told(own, tmp_path, name, reason, capsys):
    assert main(["export", "--function", f"{own}:{name}", "--out", str(tmp_path / "x")]) == 2
    assert reason in capsys.readouterr().err


def test_an_error_in_the_function_names_its_line(own, tmp_path, capsys):
    wrong = tmp_path / "wrong_model.py"
    wrong.write_text(own.read_text().replace('params["w"]', 'params["v"]'))
    assert main(["export", "--function", f"{wrong}:make", "--out", str(tmp_path / "x")]) == 2
    assert f"raises KeyError at {wrong}:7: 'v'" in capsys.readouterr().err
