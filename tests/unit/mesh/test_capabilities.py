"""The table of mesh axes: what is not in it is refused, by every command and with one paragraph."""

from pathlib import Path

import pytest

from fornax.cli.main import main
from fornax.cli.reference import config_page
from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh import DEFAULT_RULES, MESH_AXES, MeshConfig, check_processes, processes_table
from fornax.mesh.capabilities import supported_axes

REFUSED = sorted(set(MESH_AXES) - set(supported_axes()))


@pytest.mark.parametrize("axis", REFUSED)
@pytest.mark.parametrize("size", [2, 8, -1])
def test_an_axis_that_divides_nothing_is_refused(axis: str, size: int) -> None:
    rest = {} if size != -1 else {"fsdp": 1}
    with pytest.raises(ConfigError, match=rf"mesh\.{axis}={size}: .*not implemented.*mesh\.fsdp"):
        MeshConfig(**{axis: size}, **rest)
    with pytest.raises(ConfigError, match=rf"mesh\.rules\.mlp: the axis '{axis}'"):
        MeshConfig(rules={"mlp": ("tensor", axis)})


def test_the_rules_name_every_supported_axis_and_no_other() -> None:
    assert {axis for axes in DEFAULT_RULES.values() for axis in axes} == set(supported_axes())


@pytest.mark.parametrize("axis", REFUSED)
@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("tune", "sft"),
        ("tune", "grpo"),
        ("plan", "--topology", "v5e:2x4"),
        ("plan", "--topology", "v5e:2x4", "--search"),
        ("preflight",),
    ],
    ids=" ".join,
)
def test_commands_refuse_it_alike(
    command: tuple[str, ...],
    axis: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, f"--mesh.{axis}", "8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"mesh.{axis}=8: the axis '{axis}'" in said
    assert "would repeat each other's work; give its devices to mesh.fsdp" in said


@pytest.mark.parametrize("axis", REFUSED)
def test_the_reference_says_so(axis: str) -> None:
    assert f"| `{axis}` | " in config_page()
    row = next(line for line in config_page().splitlines() if line.startswith(f"| `{axis}` |"))
    assert row.endswith("| no | no | no | no | no |")


@pytest.mark.parametrize(
    ("command", "use"),
    [
        (("plan", "--topology", "v5e:2x4"), "plan"),
        (("plan", "--topology", "v5e:2x4", "--search"), "plan"),
        (("preflight",), "preflight"),
    ],
    ids=" ".join,
)
def test_a_command_refuses_an_axis_that_only_others_have(
    command: tuple[str, ...],
    use: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--mesh.expert", "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "mesh.expert=2: the axis 'expert' (" in said
    assert f"is not supported yet ({use}); give its devices to mesh.fsdp" in said


def test_work_of_one_process_is_refused_by_name_and_listed() -> None:
    check_processes("pretraining", 5)
    check_processes("reinforcement learning without samplers", 1)
    with pytest.raises(ClusterError, match="samplers runs in one process, and this run has 3; st"):
        check_processes("reinforcement learning without samplers", 3)
    for work, allowed in processes_table():
        assert f"| {work} | {allowed} |" in config_page()
    assert dict(processes_table())["KTO"] == "any number"
    assert dict(processes_table())["On-policy distillation"] == "any number"
    alone = dict(processes_table())["On-policy distillation without samplers"]
    assert alone.startswith("one: start one process")
