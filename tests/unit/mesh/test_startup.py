"""Processes that cannot join refuse to run; the environment has one reader."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fornax
from fornax.config import environment
from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh import ProcessConfig, initialize, startup

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
    ("config", "message"),
    [
        (ProcessConfig(num_processes=2), "coordinator=None"),
        (
            ProcessConfig(num_processes=2, process_id=2, coordinator="127.0.0.1:1"),
            "process_id=2 is not below num_processes=2",
        ),
    ],
)
def test_an_incomplete_address_is_refused(config, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        startup._join(config)


_JOIN = """
import sys
from fornax.mesh import initialize, ProcessConfig
from fornax.config.errors import ClusterError
number, count, port = map(int, sys.argv[1:])
try:
    initialize(ProcessConfig(coordinator=f"127.0.0.1:{port}", num_processes=count,
                             process_id=number, join_timeout=3))
    import jax
    print("joined", jax.process_count(), len(jax.devices()))
except ClusterError as error:
    print("refused:", error)
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(number: int, count: int, port: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _JOIN, str(number), str(count), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )


def test_processes_join_and_one_left_alone_refuses_to_run():
    joined = _free_port()
    alone = _free_port()
    processes = [_start(0, 2, joined), _start(1, 2, joined), _start(0, 2, alone)]
    nobody = _start(1, 2, _free_port())
    outputs = [process.communicate(timeout=90)[0] for process in (*processes, nobody)]
    assert "joined 2 4" in outputs[0], outputs[0]
    assert "joined 2 4" in outputs[1], outputs[1]
    assert "refused: process 1 of 2 did not join within 3 s" in outputs[2], outputs[2]
    assert "refused: process 1 of 2 could not join" in outputs[3], outputs[3]


def test_two_processes_with_one_number_are_refused():
    port = _free_port()
    processes = [_start(0, 3, port), _start(1, 3, port), _start(1, 3, port)]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert "process number 1 joined twice" in outputs[0], outputs[0]
    assert all("refused" in output for output in outputs)


def test_more_virtual_devices_than_cores_get_threads(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=64")
    environment.prepare_virtual_devices()
    assert int(os.environ["NPROC"]) >= 64
    monkeypatch.setenv("NPROC", "5")
    environment.prepare_virtual_devices()
    assert os.environ["NPROC"] == "5"
