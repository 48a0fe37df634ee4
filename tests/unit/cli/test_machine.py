"""`fornax doctor`: each problem is named with its fix, and only what stops Fornax is an error."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from fornax.cli import machine
from fornax.cli.commands import doctor
from fornax.cli.machine import Finding
from fornax.cli.main import main


def only(findings) -> Finding:
    [finding] = findings
    return finding


def test_a_sound_machine_reports_everything_and_returns_0(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    names = ["fornax", "python", "jax", "flax", "devices", "platform", "compiler", "TPU compiler"]
    names += ["native kernels", "cores", "memory", "/dev/shm", "open files", "disk here", "cache"]
    for name in [*names, "extras"]:
        assert any(line.startswith(f"{name} ") for line in out.splitlines())


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ([Finding(name="a", value="1")], 0, "No problems found."),
        (
            [Finding(name="a", value="1", problem="it is odd", fix="turn it")],
            0,
            "note: a: it is odd; turn it",
        ),
        (
            [Finding(name="a", value="1", problem="it is gone", fix="get it", fatal=True)],
            2,
            "error: a: it is gone; get it",
        ),
    ],
)
def test_the_exit_code_follows_the_findings(capsys, monkeypatch, findings, code, last):
    monkeypatch.setattr(machine, "examine", lambda: findings)
    assert doctor.run(doctor.Arguments()) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_findings_for_programs(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["platform"]["value"].startswith("cpu: every test, in CI")
    assert found["jax"] == {
        "name": "jax",
        "value": jax.__version__,
        "problem": "",
        "fix": "",
        "fatal": False,
    }


def test_an_extra_that_is_not_there_is_told_with_its_command(monkeypatch):
    monkeypatch.setattr(machine, "_complete", lambda package, extra: extra != "hub")
    found = {finding.name.strip(): finding for finding in machine._extras()}
    assert list(found) == ["extras", "hub"]
    assert "serve" in found["extras"].value
    assert found["hub"].value.endswith("pip install 'fornax-ai[hub]'")


def test_kernels_that_are_not_compiled_yet_are_counted_and_not_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    found = only(machine._native())
    assert re.match(r"0 of \d+ compiled; the others", found.value)
    assert not found.fix
    assert list(tmp_path.iterdir()) == []


def test_little_shared_memory_is_noted(monkeypatch):
    class Usage:
        free = total = 2**26

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    found = only(machine._shared_memory())
    assert found.problem
    assert "--shm-size" in found.fix


@pytest.mark.parametrize(("hard", "noted"), [(1024, True), (2**20, False), (-1, False)])
def test_few_descriptors_are_noted(monkeypatch, hard, noted):
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, hard))
    assert bool(only(machine._open_files()).fix) == noted


@pytest.mark.parametrize(
    ("installed", "problem"),
    [("0.9.2", "0.9.2 is outside <0.13,>=0.10"), (None, "it is not installed")],
)
def test_a_package_out_of_bounds_or_missing_is_an_error(monkeypatch, installed, problem):
    real = machine._installed
    monkeypatch.setattr(machine, "_installed", lambda p: installed if p == "jax" else real(p))
    off = only(finding for finding in machine._versions() if finding.fix)
    assert off.name == "jax"
    assert off.problem == problem
    assert off.fix == "pip install 'jax<0.13,>=0.10'"
    assert off.fatal


def test_a_backend_that_does_not_start_is_an_error(monkeypatch):
    def broken() -> Any:
        raise RuntimeError("no\ndriver")

    monkeypatch.setattr(jax, "devices", broken)
    off = only(machine._devices())
    assert off.problem == "jax does not start (RuntimeError: no driver)"
    assert off.fatal


@pytest.mark.parametrize(("hardware", "extra"), [("NVIDIA GPU", "cuda"), ("TPU", "tpu")])
def test_an_accelerator_that_jax_does_not_use_is_noted(monkeypatch, hardware, extra):
    monkeypatch.setattr(machine, "_accelerator", lambda: hardware)
    off = only(machine._devices())
    assert off.problem == f"there is a {hardware} here, and jax uses the CPU"
    assert off.fix == f"pip install 'fornax-ai[{extra}]'"
    assert not off.fatal


def test_a_missing_compiler_is_noted(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert only(machine._compiler()).problem == "there is no C++ compiler"
    monkeypatch.setenv("CXX", "nonesuch")
    assert only(machine._compiler()).problem == "CXX=nonesuch is not a program"


def test_the_compiler_of_the_environment_comes_first(monkeypatch, tmp_path):
    compiler = tmp_path / "mycc"
    compiler.write_text(f"#!{sys.executable}\nprint('mycc 7')\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert only(machine._compiler()).value == f"{compiler} (mycc 7)"


def test_little_memory_is_noted(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 2**30)
    assert only(machine._memory()).problem == "the quickstart needs 2 GiB"


def test_a_cache_that_cannot_be_written_names_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    off = only(finding for finding in machine._disks() if finding.fix)
    assert off.problem == f"{tmp_path} is not writable"
    assert off.fix == "set FORNAX_CACHE_DIR to a folder that is"


def test_a_full_disk_is_noted(monkeypatch):
    class Usage:
        free = 2**20

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    assert [finding.problem for finding in machine._disks()] == ["less than 1 GiB is free"] * 2


def test_an_extra_is_there_only_when_all_that_it_names_is(monkeypatch):
    there = {"a", "b"}
    wanted = {
        ("top", "x"): ["a", "b[deep]"],
        ("b", "deep"): ["c"],
    }
    monkeypatch.setattr(machine, "_installed", lambda package: "1" if package in there else None)
    monkeypatch.setattr(
        machine,
        "_requirements",
        lambda package, extra: [machine.Requirement(t) for t in wanted.get((package, extra), [])],
    )
    assert not machine._complete("top", "x")
    there.add("c")
    assert machine._complete("top", "x")
    assert not machine._complete("top", "for another Python")


@pytest.mark.parametrize(
    ("installed", "value", "problem"),
    [
        (None, "none (plans for TPUs are then predicted only; pip install 'fornax-ai[tpu]')", ""),
        ("0.0.1", "libtpu 0.0.1", "this jax goes with libtpu ==0.0.77.*"),
        ("0.0.77.2", "libtpu 0.0.77.2", ""),
    ],
)
def test_the_tpu_compiler_is_told_and_held_to_what_jax_asks_for(
    monkeypatch, installed, value, problem
):
    wanted = [machine.Requirement("libtpu==0.0.77.*"), machine.Requirement("requests")]
    monkeypatch.setattr(machine, "_installed", lambda p: installed)
    monkeypatch.setattr(machine, "_requirements", lambda package, extra: wanted)
    found = only(machine._tpu_compiler())
    assert found.value == value
    assert found.problem.startswith(problem)
    assert bool(found.fix) == bool(problem)


SLURM = {"SLURM_STEP_NODELIST": "gpu[3-4]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("variables", "value", "problem"),
    [
        ({}, "one (no launcher found)", ""),
        (SLURM, "process 1 of 2, process 0 at gpu3:61440 (SLURM)", ""),
        ({"FORNAX_NUM_PROCESSES": "3"}, "process None of 3, process 0 at None", "are needed"),
        ({"FORNAX_PROCESS_ID": "one"}, "unknown", "FORNAX_PROCESS_ID='one' is not a whole number"),
    ],
)
def test_the_processes_that_a_launcher_started_are_shown(
    variables: dict[str, str], value: str, problem: str, monkeypatch: pytest.MonkeyPatch
):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    finding = only(machine._processes())
    assert finding.value.startswith(value)
    assert problem in finding.problem
    assert bool(finding.fix) == bool(problem)
