"""The comparison of the training step at two revisions knows when there is nothing to compare."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_step.py"


@pytest.fixture
def checkout(tmp_path):
    """A folder with the script in its place, and how to run it."""
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "benchmarks")

    def run(*words):
        command = [sys.executable, str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def git(*words):
        own = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *own, *words], check=True, capture_output=True)

    return run, git


def test_without_history_nothing_is_compared(checkout):
    run, git = checkout
    git("init", "-q")  # no commit: also hides a repository around the temporary folder
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "no git history" in done.stdout


def test_a_first_commit_has_no_base(checkout):
    run, git = checkout
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    done = run()
    assert done.returncode == 0
    assert "no base is known" in done.stdout


def test_a_base_that_is_no_commit_is_a_mistake(checkout):
    run, git = checkout
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    done = run("--base", "nowhere")
    assert done.returncode == 2
    assert "nowhere is not a commit" in done.stderr


def test_a_base_without_the_step_is_said_and_passes(checkout):
    run, git = checkout
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    git("commit", "-q", "--allow-empty", "-m", "second")
    done = run()
    assert done.returncode == 0
    assert "cannot be made by this script" in done.stdout
