"""Processes that cannot join refuse to run; the environment has one reader."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.xla_flags import xla_flags

import fornax
from fornax.config import environment
from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh import ProcessConfig, initialize, startup
from fornax.mesh.launchers import Launched
from fornax.mesh.rendezvous import meet

SOURCE = Path(fornax.__file__).parent


def test_only_one_file_reads_the_environment():
    readers = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\bos\.(environ|getenv|putenv)\b", path.read_text())
    ]
    assert readers == ["config/environment.py"]


def test_every_variable_read_is_documented():
    text = (SOURCE / "config/environment.py").read_text()
    read = set(re.findall(r'environ\.get\("((?:FORNAX_\w+|CXX))"', text))
    assert read <= set(environment.documented())
    assert {name for name in environment.documented() if name.startswith("FORNAX")} <= read


def test_a_number_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("FORNAX_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match="FORNAX_NUM_PROCESSES='two'"):
        initialize()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Launched(num_processes=2, launcher="SLURM"), "process_id=None (from SLURM); set"),
        (
            Launched(num_processes=2, process_id=2, coordinator="127.0.0.1:1"),
            "process_id=2 is not below num_processes=2",
        ),
    ],
)
def test_an_incomplete_address_is_refused(found, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        startup._join(found, ProcessConfig())


_JOIN = """
import sys
import jax
from fornax.mesh import initialize, ProcessConfig
from fornax.config.errors import ClusterError
print("imported", flush=True)
input()
number, count, port, seconds = map(int, sys.argv[1:])
try:
    initialize(ProcessConfig(coordinator=f"127.0.0.1:{port}", num_processes=count,
                             process_id=number, join_timeout=seconds))
    print("joined", jax.process_count(), len(jax.devices()))
except ClusterError as error:
    print("refused:", error)
"""


def _start(number: int, count: int, port: int, seconds: int = 180) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _JOIN, *map(str, (number, count, port, seconds))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "XLA_FLAGS": xla_flags(2)},
    )


def _join(*processes: subprocess.Popen) -> list[str]:
    """What each says, when all join at the same time."""
    for process in processes:
        assert process.stdout is not None
        while process.stdout.readline() != "imported\n":
            assert process.poll() is None
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate(timeout=400)[0] for process in processes]


@pytest.mark.slow
def test_processes_join_and_one_left_alone_refuses_to_run():
    joined = held_port()
    alone = held_port()
    processes = [_start(0, 2, joined), _start(1, 2, joined), _start(0, 2, alone, 3)]
    nobody = _start(1, 2, held_port(), 3)
    outputs = _join(*processes, nobody)
    assert "joined 2 4" in outputs[0], outputs[0]
    assert "joined 2 4" in outputs[1], outputs[1]
    assert "refused: process 1 of 2 did not join within 3 s" in outputs[2], outputs[2]
    assert "refused: process 1 of 2 could not join" in outputs[3], outputs[3]


@pytest.mark.slow
def test_two_processes_with_one_number_are_refused():
    port = held_port()
    seconds = {0: 120, 1: 10}  # who is refused with the first tries again until then
    outputs = _join(*(_start(number, 3, port, seconds[number]) for number in (0, 1, 1)))
    assert "process number 1 of 3 joined twice" in outputs[0], outputs[0]
    assert all("refused" in output for output in outputs)


def test_a_launcher_whose_other_processes_do_not_come_is_named():
    found = Launched(
        launcher="SLURM", coordinator=f"127.0.0.1:{held_port()}", num_processes=2, process_id=0
    )
    with pytest.raises(ClusterError, match="SLURM asked for 2 processes; for one alone set FORNAX"):
        startup._join(found, ProcessConfig(join_timeout=1))


def test_strangers_at_the_coordinators_port_are_ignored():
    """A port scan, a health check, a half-open connection, a TLS hello: while others still join."""
    port = held_port()
    failures: list[Exception] = []

    def take_part(number: int) -> None:
        try:
            meet(f"127.0.0.1:{port}", 3, number, 120)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(3)]
    threads[0].start()
    silent = [_connect(port) for _ in range(20)]
    for said in (
        b"",
        b"1",
        b"2\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + bytes(400),
        b"x" * 39,
    ):
        with _connect(port) as stranger:
            stranger.sendall(said)
    began = time.monotonic()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    for stranger in silent:
        stranger.close()
    assert not failures
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("noticed", [False, True])
def test_a_process_that_died_while_joining_may_come_again(noticed: bool):
    port = held_port()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, f"127.0.0.1:{port}", 3, 0, 120)
        with _connect(port) as dying:
            dying.sendall(b"fornax-join 3 1\n")
            time.sleep(0.1 * noticed)
        time.sleep(0.1 * noticed)
        others = [pool.submit(meet, f"127.0.0.1:{port}", 3, n, 120) for n in (1, 2)]
        for done in (first, *others):
            done.result(timeout=240)


def test_a_process_of_another_run_is_refused():
    port = held_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, f"127.0.0.1:{port}", 3, 0, 120)
        with _connect(port) as other:
            other.sendall(b"fornax-join 4 1\n")
            with pytest.raises(ClusterError, match=r"number 1 of 4 .* this run of 3 processes"):
                first.result(timeout=240)


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=120)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_more_virtual_devices_than_cores_get_threads(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=64")
    environment.prepare_virtual_devices()
    assert int(os.environ["NPROC"]) >= 64
    monkeypatch.setenv("NPROC", "5")
    environment.prepare_virtual_devices()
    assert os.environ["NPROC"] == "5"
