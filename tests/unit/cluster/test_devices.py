"""The GPUs of replicas and hosts, from the environment."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from fornax.cluster.beside_process import SAMPLER, BesideJob
from fornax.cluster.devices import device_variables, host_variables
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import LocalEngine
from fornax.cluster.slices import launch_slices
from fornax.config.credentials import Credentials
from fornax.config.errors import ClusterError


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2,5,GPU-7")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.parametrize(
    ("replicas", "each", "shares"),
    [(2, 2, ["0,2", "5,GPU-7"]), (2, 1, ["0", "2"]), (2, 0, ["0,2", "5,GPU-7"]), (1, 4, None)],
)
def test_each_replica_has_gpus_of_its_own(four_gpus, replicas, each, shares):
    found = [process["CUDA_VISIBLE_DEVICES"] for [process] in device_variables(replicas, each)]
    assert found == (shares or ["0,2,5,GPU-7"])


@pytest.mark.parametrize(("replicas", "each"), [(3, 2), (5, 1), (5, 0)])
def test_too_few_gpus_are_refused(four_gpus, replicas, each):
    with pytest.raises(ClusterError, match="this machine has 4"):
        device_variables(replicas, each)


def test_on_cpu_replicas_share_the_cores(four_gpus, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert device_variables(9, 2, 3) == [[{}] * 3] * 9


def test_the_processes_of_a_replica_divide_its_gpus(four_gpus):
    found = device_variables(2, 2, hosts=2)
    assert [[each["CUDA_VISIBLE_DEVICES"] for each in replica] for replica in found] == [
        ["0", "2"],
        ["5", "GPU-7"],
    ]
    with pytest.raises(ClusterError, match="cannot be divided over 2 processes"):
        device_variables(4, 1, hosts=2)


@pytest.mark.parametrize(
    ("hosts", "shares"),
    [(1, ["0,2,5,GPU-7"]), (2, ["0,2", "5,GPU-7"]), (4, ["0", "2", "5", "GPU-7"])],
)
def test_hosts_divide_the_gpus(four_gpus, hosts, shares):
    assert [each["CUDA_VISIBLE_DEVICES"] for each in host_variables(hosts)] == shares


@pytest.mark.parametrize(
    ("hosts", "fix"), [(3, "name 3 of them in CUDA_VISIBLE_DEVICES"), (8, r"\(1, 2, 4\), or set")]
)
def test_gpus_that_do_not_divide_are_refused(four_gpus, hosts, fix):
    with pytest.raises(ClusterError, match=fix):
        host_variables(hosts)


def test_on_cpu_any_number_of_hosts_is_there(four_gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    launcher = LocalEngine(3).launcher(ClusterFiles(tmp_path), spare=False)
    assert launcher.capacity() > 1000
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host_variables(3) == []


def test_a_host_and_what_it_runs_see_their_own_gpus(four_gpus, tmp_path):
    """Processes are started; none asks for a GPU."""
    with contextlib.closing(LocalEngine(2)) as engine:
        seen = engine.map(lambda _: os.environ["CUDA_VISIBLE_DEVICES"], range(2))
        assert seen == ["0,2", "5,GPU-7"]
        launcher = engine.launcher(ClusterFiles(tmp_path), spare=False)
        assert launcher.capacity() == 2  # a resize to three hosts finds no GPUs for the third
        files = ClusterFiles(tmp_path)
        with files.held():
            agents = launcher.start([1, 0])
            found = {}
            for rank, agent in agents.items():
                while not (words := Path(f"/proc/{agent.pid}/environ").read_bytes()):
                    time.sleep(0.01)  # it is empty until the new program has its memory
                found[rank] = [
                    word for word in words.split(b"\0") if word.startswith(b"CUDA_VISIBLE_DEVICES")
                ]
                agent.kill()
        assert found == {
            0: [b"CUDA_VISIBLE_DEVICES=0,2"],
            1: [b"CUDA_VISIBLE_DEVICES=5,GPU-7"],
        }
        job = BesideJob(
            run_dir=tmp_path,
            role=SAMPLER,
            number=0,
            credentials=Credentials.make(),
            order={},
            stall=5.0,
        )
        with pytest.raises(ClusterError, match="leaves none for a sampler"):
            launcher.start_beside(job)


def test_slices_divide_the_gpus(four_gpus, tmp_path):
    def words(directory: Path) -> list[str]:
        return ["sh", "-c", f"echo $CUDA_VISIBLE_DEVICES > {directory}/seen"]

    assert launch_slices("subprocess:call", words, tmp_path, 2) == 0
    seen = [(tmp_path / f"slice-{number}" / "seen").read_text() for number in range(2)]
    assert seen == ["0,2\n", "5,GPU-7\n"]
    with pytest.raises(ClusterError, match="3 slices cannot divide the 4 GPUs"):
        launch_slices("subprocess:call", words, tmp_path, 3)
