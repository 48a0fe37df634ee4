"""Completion scripts run in their shells: what bash, zsh and fish offer after some words."""

import os
import pty
import shutil
import subprocess
import time

import pytest

from fornax.cli.main import main

OFFERED = [
    ("fornax tu", {"tune"}),
    ("fornax tune g", {"grpo"}),
    ("fornax tune grpo --lora.rank-p", {"--lora.rank-pattern"}),
    ("fornax train --optim.optimizer.type m", {"muon"}),
    ("fornax convert models/x --dtype b", {"bfloat16"}),
    ("fornax convert --ou", {"--out"}),
    ("fornax plan s", {"serve"}),
    ("fornax plan --topo", {"--topology"}),
]


@pytest.fixture
def script_of(tmp_path, capsys):
    def written(shell):
        path = tmp_path / shell
        assert main(["completion", shell]) == 0
        path.write_text(capsys.readouterr().out, encoding="utf-8")
        return path

    return written


_BASH = """
source "$1"
compopt() { :; }
COMP_WORDS=($2)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_fornax
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash(script_of):
    script = script_of("bash")
    for line, offered in OFFERED:
        command = ["bash", "--norc", "-c", _BASH, "bash", str(script), line]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert set(done.stdout.split()) == offered, line


def test_bash_stops_at_the_dot_of_a_group_of_keys(script_of):
    command = ["bash", "--norc", "-c", _BASH, "bash", str(script_of("bash")), "fornax train --opt"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--optim."]


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish(script_of):
    script = script_of("fish")
    for line, offered in OFFERED:
        code = 'source $argv[1]; complete -C "$argv[2]"'
        command = ["fish", "--no-config", "-c", code, str(script), line]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert {each.partition("\t")[0] for each in done.stdout.splitlines()} == offered, line


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh(script_of, tmp_path):
    """By its line editor, on a terminal: the line is completed where one word is offered."""
    script = script_of("zsh")
    terminal, other = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=other, stdout=other, stderr=other, cwd=tmp_path
    )
    os.close(other)
    seen = ""

    def wait_for(text):
        nonlocal seen
        until = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < until, seen
            seen += os.read(terminal, 65536).decode(errors="replace")

    try:
        ready = "autoload -Uz compinit; compinit -u -D; source $FILE; print rea''dy\n"
        os.write(terminal, ready.replace("$FILE", str(script)).encode())
        wait_for("ready")
        for line, offered in OFFERED:
            seen = ""
            (word,) = offered
            os.write(terminal, f"{line}\t".encode())
            wait_for(line[: line.rindex(" ") + 1] + word)
            os.write(terminal, b"\x15")
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_a_wrong_shell(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
