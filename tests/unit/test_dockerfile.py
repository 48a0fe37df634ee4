"""The Dockerfile names what exists: stages, extras, make targets, files, options of commands."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def _instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, comments gone and continued lines joined."""
    text = re.sub(r"^#.*\n", "", (_ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def _arguments(instruction: str) -> list[str]:
    return [rest for name, rest in _instructions() if name == instruction]


def test_stages_build_on_known_ones_and_name_the_three_platforms() -> None:
    known: set[str] = set()
    for rest in _arguments("FROM"):
        source, stage = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()
        assert source in known or source == "python:${PYTHON}-slim"
        known.add(stage)
    assert known == {"wheel", "base", "cpu", "cuda", "tpu"}
    for rest in _arguments("COPY"):
        stage = re.match(r"--from=(\w+)", rest)
        assert stage is None or stage[1] in known


def test_default_python_is_one_that_the_package_takes() -> None:
    (default,) = _arguments("ARG")
    minor = int(re.fullmatch(r"PYTHON=3\.(\d+)", default)[1])
    assert minor >= int(re.fullmatch(r">=3\.(\d+)", _PROJECT["requires-python"])[1])


def test_installs_this_package_with_extras_that_exist() -> None:
    wanted = [extras for rest in _arguments("RUN") for extras in re.findall(r"'([^']+)'", rest)]
    assert len(wanted) == 3
    for requirement in wanted:
        name, extras = re.fullmatch(r"([\w-]+)\[([\w,]+)\]", requirement).groups()
        assert name == _PROJECT["name"]
        assert set(extras.split(",")) <= set(_PROJECT["optional-dependencies"])


def test_make_targets_and_copied_files_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    called = [target for rest in _arguments("RUN") for target in re.findall(r"^make (\S+)", rest)]
    assert called == ["wheel"]
    assert set(called) <= set(targets)
    kept_out = (_ROOT / ".dockerignore").read_text().split()
    needed = ["constraints.txt", "pyproject.toml", "wheel_build.py", "src", "recipes", "README.md"]
    for name in needed:
        assert (_ROOT / name).exists()
        assert name not in kept_out


@pytest.mark.slow
def test_entry_point_is_the_command_and_its_example_parses() -> None:
    (entry,) = _arguments("ENTRYPOINT")
    assert entry.strip('[]"') in _PROJECT["scripts"]
    text = (_ROOT / "Dockerfile").read_text().replace("\\\n#", " ")
    example = re.search(r"fornax:cpu\s+(serve .*)", text)[1]
    command, _, *options = shlex.split(example)
    help_text = subprocess.run(
        [sys.executable, "-m", "fornax", command, "--help-config"],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    ).stdout
    for option in filter(lambda word: word.startswith("--"), options):
        assert option.removeprefix("--").replace("-", "_") in help_text


@pytest.mark.parametrize("variable", ["FORNAX_CACHE_DIR"])
def test_variables_of_ours_are_read(variable: str) -> None:
    from fornax.config import environment

    assert any(variable in rest for rest in _arguments("ENV"))
    assert variable in environment.documented()
