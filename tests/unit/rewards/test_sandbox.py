"""Programs in the sandbox work, and each attack is held; nothing runs where it would not be."""

import functools
import http.server
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fornax.config.errors import ConfigError
from fornax.rewards import RewardPool, RewardSpec, Sample, sandbox
from fornax.rewards.sandbox import REQUIRED, Limits, Outcome, run

SECONDS = 1.0
BRIEF = Limits(seconds=SECONDS)
PATIENT = Limits(seconds=120)
run_program = functools.partial(sandbox.run_program, limits=PATIENT)
run_tests = functools.partial(sandbox.run_tests, limits=PATIENT)


@pytest.fixture(scope="module", autouse=True)
def _held() -> None:
    """Attacks are refused, not run, where the kernel does not hold them: then say so."""
    try:
        run_program("pass")
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_program_and_its_tests() -> None:
    found = run_tests(
        "def double(x):\n    return 2 * x",
        ["assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa'"],
    )
    assert found.verdicts == ("passed", "failed", "passed")
    assert found.errors[1].startswith("AssertionError")


def test_a_program_that_reads_and_prints() -> None:
    found = run_program("import sys\nprint(sum(map(int, sys.stdin)))", stdin="1\n2\n3\n")
    assert (found.code, found.output, found.error) == (0, "6\n", "")
    assert found.held >= REQUIRED


def test_ordinary_work_is_possible() -> None:
    program = """
import asyncio, collections, json, math, random, re, tempfile, threading
with tempfile.TemporaryFile("w+") as file:
    file.write("kept")
    file.seek(0)
    print(file.read(), end=" ")
open("mine.txt", "w").write("here")
print(open("mine.txt").read(), end=" ")
thread = threading.Thread(target=lambda: print("thread", end=" "))
thread.start()
thread.join()
print(hash("fixed") == hash("fixed"), __name__)
"""
    found = run_program(program)
    assert (found.output, found.error) == ("kept here thread True __main__\n", "")


def test_sets_have_one_order_in_every_run() -> None:
    program = "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}))"
    assert run_program(program).output == run_program(program).output


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(600)", "input()\nwhile True: pass"],
    ids=["loop", "sleep", "stdin"],
)
def test_time_is_held(program: str) -> None:
    found = run_program(program, stdin="x\n", limits=BRIEF)
    assert (found.code, found.error) == (None, "took over 1 s")
    assert found.seconds < SECONDS + 60


@pytest.mark.parametrize(
    "program",
    ["x = bytearray(1 << 40)", "a = []\nfor _ in range(99): a.append(bytearray(1 << 22))"],
)
def test_a_memory_bomb_is_held(program: str) -> None:
    found = run_program(program, limits=Limits(seconds=120, memory_mb=128))
    assert (found.code, found.error) == (1, "MemoryError:")


def test_a_fork_bomb_is_held() -> None:
    """Bounded, as every attack here: harmless should the sandbox fail."""
    program = "import os\nfor _ in range(50):\n    if not os.fork(): os._exit(0)"
    assert "PermissionError" in run_program(program).error


def test_a_count_of_processes_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:  # only an ordinary user's processes are counted; this program needs no
        monkeypatch.setattr("fornax.rewards.sandbox.run._open_to_all", lambda path: True)  # library
    program = """
import os, time
made = 0
try:
    for _ in range(50):
        if not os.fork():
            time.sleep(600)
            os._exit(0)
        made += 1
finally:
    print(made)
"""
    found = run_program(program, limits=Limits(seconds=120, processes=4))
    assert (found.output, found.error[:15]) == ("3\n", "BlockingIOError")
    assert found.seconds < 100, "what it began is ended with it"


def test_writing_outside_is_held(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for place in (tmp_path / "new", mine, Path("/tmp/fornax-escape")):
        error = run_program(f"open({str(place)!r}, 'w').write('x')").error
        assert error.startswith(("OSError", "PermissionError"))
    for attack in ("os.chmod({!r}, 0)", "os.remove({!r})", "os.rename({!r}, 'x')"):
        error = run_program("import os\n" + attack.format(str(mine))).error
        assert error.startswith(("OSError", "PermissionError")), attack
    assert mine.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [mine]
    assert not Path("/tmp/fornax-escape").exists()


def test_the_size_of_files_is_held() -> None:
    limits = Limits(seconds=120, files_mb=2)
    one = run_program("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 18))", limits=limits)
    assert one.error == "signal 25"  # SIGXFSZ
    many = "for n in range(9):\n    with open(str(n), 'wb') as f: f.write(bytes(1 << 20))"
    assert "No space left" in run_program(many, limits=limits).error


def test_printing_is_held() -> None:
    found = run_program("while True: print('x' * 4096)", limits=Limits(seconds=120, output_kb=64))
    assert (found.code, found.error) == (None, "printed over 64 KiB")


@pytest.fixture
def server() -> Iterator[int]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found.server_port
        found.shutdown()
        thread.join()


def test_the_network_is_held(server: int) -> None:
    for attack in (
        f"import socket\nsocket.create_connection(('127.0.0.1', {server}), 1)",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
        "import os, ctypes\nif ctypes.CDLL(None).syscall(425, 1, None) < 0: raise OSError('uring')",
    ):
        assert run_program(attack).error.startswith(("PermissionError", "OSError")), attack


def test_reading_home_is_held(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("secret")
    secret.chmod(0o644)
    for attack in (
        f"print(open({str(secret)!r}).read())",
        f"import os; print(os.listdir({str(tmp_path)!r}))",
        "import os; print(os.listdir(os.path.expanduser('~root')))",
        "print(open('/etc/passwd').read())",
        "print(open('/proc/self/environ').read())",
        f"print(open('/proc/{os.getpid()}/environ').read())",
    ):
        found = run_program(attack)
        assert "PermissionError" in found.error or "FileNotFoundError" in found.error, attack
        assert found.output == ""


def test_the_environment_does_not_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    assert run_program("import os; print('SECRET_TOKEN' in os.environ)").output == "False\n"


def test_killing_the_parent_is_held() -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for pid in (victim.pid, os.getpid()):
            found = run_program(f"import os; os.kill({pid}, 9)")
            assert found.error.startswith(("ProcessLookupError", "PermissionError"))
        run_program("import os; os.kill(os.getppid(), 9)")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os\nfor n in range(3, 64):\n  try: os.write(n, b'{\"passed\": [true]}')\n"
        "  except OSError: pass\nos._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
    ],
    ids=["_exit", "exit", "forged answer", "kill"],
)
def test_a_program_that_ends_early_passes_no_test(program: str) -> None:
    assert run_tests(program, ["assert False"]).verdicts == ("failed",)


def test_nothing_runs_where_the_kernel_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold a program's teleport.*unheld=allow"):
        run_program("open('ran', 'w')", required=frozenset({"teleport"}))


def test_without_namespaces_the_rest_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(run.__file__).parent
    enter = tmp_path / "inside" / "enter.py"
    enter.parent.mkdir()
    enter.write_text(
        f"""
import sys
sys.path.insert(0, {str(folder)!r})
import kernel, values
def refused(**_):
    raise OSError(1, "no namespaces here")
kernel.separate = refused
exec(compile(open({str(folder / "enter.py")!r}).read(), "enter.py", "exec"))
"""
    )
    monkeypatch.setattr(run, "_ENTER", enter)
    monkeypatch.setattr(run, "_SYSTEM", (*run._SYSTEM, str(folder)))
    found = run_program("print('well')")
    assert found.output == "well\n"
    assert found.held == REQUIRED
    mine = tmp_path / "mine"
    mine.write_text("kept")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for attack in (
            f"import os; os.kill({victim.pid}, 9)",
            f"import os; os.chmod({str(mine)!r}, 0)",
            f"import os; os.truncate({str(mine)!r}, 0)",
            f"open({str(mine)!r}, 'a')",
            f"open({str(mine)!r})",
            "import socket; socket.socket()",
            "import os; os.fork() or os._exit(0)",
        ):
            assert run_program(attack).error.startswith("PermissionError"), attack
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert mine.read_text() == "kept"
    with pytest.raises(ConfigError, match="does not hold a program's processes"):
        run_program("pass", limits=Limits(processes=2))


def test_a_program_ends_with_the_worker_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = RewardSpec(
        function="code", options={"limits.seconds": "1200"}, timeout_seconds=SECONDS, name="slow"
    )
    sample = Sample("p", "import time; time.sleep(1000)", {"tests": ["assert f(1)"]})
    with RewardPool([spec], workers=1, log=tmp_path / "log") as pool:
        [score] = pool.score([sample])
    assert score.notes == {"slow": "took over 1 s"}
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    deadline = time.monotonic() + 120
    while _sandboxes(tmp_path):
        assert time.monotonic() < deadline, "the program outlived its worker"
        time.sleep(0.02)


def _sandboxes(folder: Path) -> list[str]:
    """Sandboxes with their files in `folder` begun by workers whose parent is gone."""
    found = []
    home = f"HOME={folder}/".encode()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            line = (status.parent / "cmdline").read_bytes()
            orphan = b"enter.py" in line and "PPid:\t1\n" in status.read_text()
            if orphan and home in (status.parent / "environ").read_bytes():
                found.append(status.parent.name)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def test_no_folder_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as place:  # one that other processes use at the same time
        os.chmod(place, 0o755)  # the program may run as another user
        monkeypatch.setattr(tempfile, "tempdir", place)
        program = "open('x', 'w')\nimport os; os.mkdir('d'); os.chmod('d', 0)"
        found: Outcome = run_program(program)
        assert found.code == 0
        assert os.listdir(place) == []
