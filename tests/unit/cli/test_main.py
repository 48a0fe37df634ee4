"""`fornax`: finding the command, its help, and what every kind of failure prints and returns."""

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fornax import __version__
from fornax.cli import registry
from fornax.cli.main import main
from fornax.config import CheckpointError, ConfigError, DataError

RUN = [sys.executable, "-c", "import sys; from fornax.cli.main import main; sys.exit(main())"]


def commands(group: registry.Group) -> list[registry.Command]:
    """Every command below a group."""
    found = [group.command] if group.command else []
    for entry in group.commands.values():
        found += commands(entry) if isinstance(entry, registry.Group) else [entry]
    return found


COMMANDS = commands(registry.ROOT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Do as the test says.

    example:
      fornax fake
    """

    run_dir: Path | None = None
    """Where."""
    times: int = 1
    """How often."""


@pytest.fixture
def fake(monkeypatch):
    """Put a command `fake` that does what the test says into the table."""

    def install(action) -> None:
        class Fake:
            name, summary, Arguments = "fake", "Fake", Arguments
            config, wraps = None, False

            def load(self) -> Any:
                return self

            def run(self, arguments: Arguments) -> int:
                return action(arguments)

        root = dataclasses.replace(registry.ROOT, commands={"fake": Fake()})  # pyrefly: ignore[bad-assignment]
        monkeypatch.setattr(registry, "ROOT", root)

    return install


def failing(error: BaseException):
    """An action that raises."""

    def action(arguments: Arguments) -> int:
        raise error

    return action


class TestHelp:
    """What a newcomer reads."""

    @pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
    def test_the_list_names_every_command_and_an_example(self, capsys, words):
        assert main(words) == 0
        out = capsys.readouterr().out
        for name, entry in registry.ROOT.commands.items():
            assert f"  {name} " in out
            assert entry.summary in out
        assert "fornax quickstart" in out

    def test_a_group_lists_its_own(self, capsys):
        assert main(["data"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: fornax data COMMAND")
        assert all(f"  {name} " in out for name in registry.DATA.commands)

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_the_help_of_a_command_fits_a_screen_and_shows_an_example(
        self, capsys, monkeypatch, command
    ):
        monkeypatch.setenv("COLUMNS", "100")
        assert main([*command.name.split(), "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 40
        assert max(len(line) for line in lines if not line.startswith("usage:")) <= 100
        assert any(line.startswith("example") for line in lines)
        assert any(line.startswith(f"  fornax {command.name}") for line in lines)
        assert any(line.startswith(f"usage: fornax {command.name} ") for line in lines)

    def test_the_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"fornax {__version__}\n"


class TestUnknown:
    """Words that name nothing."""

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["trian"], "trian is not a command of fornax; did you mean train? It has quickstart,"),
            (["xyz"], "xyz is not a command of fornax; it has quickstart,"),
            (
                ["data", "biuld"],
                "biuld is not a command of fornax data; did you mean build? It has",
            ),
            (["fake", "--tims", "2"], "--tims is not a flag of fornax fake; did you mean --times?"),
            (["fake", "word"], "'word' is a word too many for fornax fake, which takes flags only"),
            (["fake", "--times", "two"], "times=two (--times on the command line) does not fit"),
        ],
    )
    def test_the_nearest_is_named_and_the_code_is_2(self, capsys, fake, words, message):
        if words[0] == "fake":
            fake(lambda arguments: 0)
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: {message}")
        assert captured.err.count("\n") == 1
        assert captured.out == ""


class TestOutcomes:
    """What a command returns or raises, and what becomes of it."""

    def test_the_code_of_a_command_is_returned(self, fake):
        fake(lambda arguments: 140 + arguments.times)
        assert main(["fake", "--times=3"]) == 143

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (ConfigError("a=1 is off;\n  use 2"), "a=1 is off; use 2"),
            (DataError("the corpus is empty"), "the corpus is empty"),
            (
                OSError(errno.ENOSPC, "No space left on device", "/full/step"),
                "/full/step: no space left on device; make room on that disk or choose another "
                "directory",
            ),
            (
                OSError(errno.EROFS, "Read-only file system", "/ro"),
                "/ro: read-only file system; that file system is read-only; choose another "
                "directory",
            ),
            (
                PermissionError(errno.EACCES, "Permission denied", "/secret"),
                "/secret: permission denied; give this user the right to it or choose another path",
            ),
            (
                FileNotFoundError(errno.ENOENT, "No such file or directory", "gone"),
                "gone: no such file or directory; check the path",
            ),
            (
                MemoryError(),
                "this machine ran out of memory; lower the batch size or free some memory",
            ),
        ],
    )
    def test_a_mistake_of_the_user_is_one_paragraph_and_code_2(self, capsys, fake, error, message):
        fake(failing(error))
        assert main(["fake"]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"

    def test_a_mistake_behind_another_exception_is_found(self, capsys, fake):
        wrapper = RuntimeError("a worker failed")
        wrapper.__cause__ = CheckpointError("step 3 is damaged")
        fake(failing(wrapper))
        assert main(["fake"]) == 2
        assert capsys.readouterr().err == "error: step 3 is damaged\n"

    def test_a_device_out_of_memory_says_what_to_lower(self, capsys, fake):
        class JaxRuntimeError(RuntimeError):
            pass

        fake(failing(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.")))
        assert main(["fake"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: the device ran out of memory (RESOURCE_EXHAUSTED: ")
        assert "lower the batch size" in err

    def test_a_bug_is_code_1_with_the_traceback_in_the_run_directory(self, capsys, fake, tmp_path):
        fake(failing(ZeroDivisionError("division\nby zero")))
        assert main(["fake", "--run-dir", str(tmp_path)]) == 1
        [file] = tmp_path.iterdir()
        assert capsys.readouterr().err == (
            f"error: ZeroDivisionError: division by zero. This is a bug in Fornax {__version__}, "
            f"not a mistake of yours: the traceback is in {file}; please report it with the "
            "command you gave\n"
        )
        assert "Traceback (most recent call last)" in file.read_text()

    def test_a_bug_without_a_run_directory_goes_to_a_temporary_file(
        self, capsys, fake, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        fake(failing(KeyError("lost")))
        assert main(["fake", f"--run-dir={tmp_path}/none"]) == 1
        assert len(list(tmp_path.glob("traceback-*.txt"))) == 1
        assert "KeyError: 'lost'" in capsys.readouterr().err

    def test_a_bug_on_a_full_disk_prints_its_traceback(self, capsys, fake, monkeypatch):
        def full(**kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("tempfile.mkstemp", full)
        fake(failing(KeyError("lost")))
        assert main(["fake"]) == 1
        err = capsys.readouterr().err
        assert "Traceback (most recent call last)" in err
        assert "the traceback is above" in err

    def test_a_broken_pipe_that_is_not_standard_output_is_not_hidden(self, capsys, fake):
        fake(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))
        assert main(["fake"]) == 1
        assert capsys.readouterr().err.startswith("error: BrokenPipeError: ")

    def test_an_interrupt_is_130(self, capsys, fake):
        fake(failing(KeyboardInterrupt()))
        assert main(["fake"]) == 130
        assert capsys.readouterr().err == "interrupted\n"

    def test_the_environment_can_ask_for_the_traceback(self, capsys, fake, monkeypatch):
        monkeypatch.setenv("FORNAX_TRACEBACK", "1")
        fake(failing(ConfigError("a=1 is off")))
        assert main(["fake"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last)")
        assert err.endswith("error: a=1 is off\n")

    def test_a_terminal_gets_a_wrapped_paragraph(self, capsys, fake, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        fake(failing(ConfigError("word " * 30)))
        assert main(["fake"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) > 2
        assert max(map(len, lines)) <= 40


class TestProcess:
    """The command as a process."""

    def test_help_imports_nothing_heavy(self):
        code = (
            "import sys; from fornax.cli.main import main; main(['--help']);"
            "print(sorted({'jax', 'numpy', 'tyro', 'rich', 'flax'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]"

    @pytest.mark.parametrize("command", ["train", "data build", "doctor"])
    def test_help_of_a_command_does_not_start_jax(self, command):
        code = (
            f"import sys; from fornax.cli.main import main; main({[*command.split(), '--help']});"
            "print(sorted({'jax', 'numpy', 'flax'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]"

    @pytest.mark.parametrize("package", ["bench", "cluster"])
    def test_what_runs_beside_others_does_not_start_jax(self, package):
        """A load generator; the agent and the controller of a launch."""
        code = (
            f"import sys, fornax.{package};"
            "print(sorted({'jax', 'flax', 'fornax.models'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.splitlines() == ["[]"]

    def test_a_mistake_exits_2_without_a_traceback(self):
        done = subprocess.run([*RUN, "trian"], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("error: trian is not a command")
        assert "Traceback" not in done.stderr

    def test_a_closed_pipe_is_quiet(self):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run([*RUN, "--help"], stdout=writer, stderr=subprocess.PIPE)
        finally:
            os.close(writer)
        assert done.returncode == 141
        assert done.stderr == b""
