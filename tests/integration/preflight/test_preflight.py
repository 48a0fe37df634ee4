"""`fornax preflight` as a user runs it: healthy recipes pass on any seed; faults end with 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.xla_flags import xla_flags

from fornax.config import load
from fornax.preflight import preflight
from fornax.train import TrainConfig

ROOT = Path(__file__).parents[3]
COMMAND = "import sys; from fornax.cli.main import main; sys.exit(main(sys.argv[1:]))"
SMALL = ["--model.num-layers", "2", "--mesh.fsdp", "1", "--mesh.data", "2"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whatever devices this one has."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "preflight", *words],
        env={k: v for k, v in os.environ.items() if k != "NPROC"} | {"XLA_FLAGS": xla_flags()},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("llama3-8b", marks=pytest.mark.exhaustive),
        pytest.param("qwen3-0.6b", marks=pytest.mark.exhaustive),
        pytest.param("gemma3-4b", marks=pytest.mark.exhaustive),
    ],
)
def test_a_recipe_passes(recipe: str):
    config = load(TrainConfig, file=ROOT / "recipes" / f"{recipe}.yaml", overrides={})
    report = preflight(config, quick=True)
    assert report.ok, report.paragraph()
    assert {check.group for check in report.checks} >= {"rules", "data", "mesh", "checkpoint"}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_pass(seed: int):
    words = ["--seed", str(seed), "--mesh.tensor", "2", "--accumulate", "2", *SMALL]
    found = run("--quick", "--only", "mesh", "precision", "packing", *words)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
def test_a_rule_that_does_nothing_ends_with_2(tmp_path: Path):
    report = tmp_path / "report.json"
    words = ["--mesh.rules", "{activation_kv_heads: [tensor]}", "--mesh.tensor", "2"]
    found = run("--only", "rules", "--json", str(report), *words)
    assert found.returncode == 2, found.stdout + found.stderr
    assert "failed rules" in found.stdout
    assert "`mesh.rules.activation_kv_heads` matches no array" in found.stderr
    assert "Traceback" not in found.stderr
    content = json.loads(report.read_text())
    assert not content["ok"]
    assert [check["status"] for check in content["checks"]] == ["ok", "failed"]


@pytest.mark.slow
def test_without_a_config_it_says_how():
    found = run()
    assert found.returncode == 2
    assert "--config" in found.stderr


@pytest.mark.slow
def test_an_unknown_group_is_named():
    found = run("--only", "meshes", "--batch-size", "8")
    assert found.returncode == 2
    assert "no group of checks 'meshes'" in found.stderr


def test_a_batch_that_does_not_divide_is_a_failed_check():
    config = load(TrainConfig, overrides=["--mesh.fsdp=3", "--batch-size=9"])
    report = preflight(config, only=("rules",))
    assert report.first_failure is not None
    assert "does not divide" in report.first_failure.detail


@pytest.mark.exhaustive
def test_products_in_eight_bits_are_left_out_and_said(tmp_path: Path):
    report = tmp_path / "report.json"
    words = ["--quant.scheme", "int8", "--json", str(report), *SMALL]
    found = run("--quick", "--only", "precision", *words)
    assert found.returncode == 0, found.stdout + found.stderr
    checks = {check["name"]: check for check in json.loads(report.read_text())["checks"]}
    assert checks["products in int8"]["status"] == "off"
