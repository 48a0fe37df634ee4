"""The table of mesh axes: what is not in it is refused, by every command and with one paragraph."""

from pathlib import Path

import pytest

from fornax.cli.config_reference import support_tables
from fornax.cli.main import main
from fornax.config.errors import ClusterError
from fornax.mesh import (
    ACROSS,
    DEFAULT_RULES,
    MESH_AXES,
    across_table,
    check_processes,
    processes_table,
)

NAMES = ("--model", "model", "--data", "data.jsonl")

STAGE = "| yes | no | no | yes | no | yes | no | no | no | no |"
"""Which uses can have stages."""


def test_the_rules_name_every_axis() -> None:
    assert {axis for axes in DEFAULT_RULES.values() for axis in axes} == set(MESH_AXES)


def test_the_reference_says_so() -> None:
    row = next(line for line in support_tables() if line.startswith("| `stage` |"))
    assert row.endswith(STAGE)


@pytest.mark.parametrize(
    ("command", "use", "axis"),
    [
        (command, use, axis)
        for axis, others in (("stage", ("sft", "dpo")),)
        for command, use in ((("tune", other, *NAMES), "tune") for other in others)
    ],
    ids=" ".join,
)
def test_a_command_refuses_an_axis_that_only_others_have(
    command: tuple[str, ...],
    use: str,
    axis: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, f"--mesh.{axis}", "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"mesh.{axis}=2: the axis '{axis}' (" in said
    assert f"is not supported yet ({use}); give its devices to mesh.fsdp" in said


def test_stages_across_slices_are_in_the_table_and_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "sft", *NAMES, "--mesh.slice", "2", "--mesh.across", "stage"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "mesh.across=stage: stages across slices are not supported yet (tune); set mes" in said
    assert [name for name, *_ in across_table()] == [f"`{name}`" for name in ACROSS]
    rows = [line for line in support_tables() if line.startswith("| `stage` |")]
    assert [row.endswith(STAGE) for row in rows] == [True, True]
    assert any("what stages pass on; gradients of embeddings" in row for row in rows)


@pytest.mark.slow
def test_work_of_one_process_is_refused_by_name_and_listed() -> None:
    check_processes("pretraining", 5)
    check_processes("reinforcement learning without samplers", 1)
    with pytest.raises(ClusterError, match="samplers runs in one process, and this run has 3; st"):
        check_processes("reinforcement learning without samplers", 3)
    for work, allowed in processes_table():
        assert f"| {work} | {allowed} |" in support_tables()
    assert dict(processes_table())["KTO"] == "any number"
    assert dict(processes_table())["On-policy distillation"] == "any number"
    alone = dict(processes_table())["On-policy distillation without samplers"]
    assert alone.startswith("one: start one process")
