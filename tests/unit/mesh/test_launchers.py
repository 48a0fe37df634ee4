"""What launchers say of a run's processes, from the variables that each of them sets."""

from collections.abc import Callable
from typing import Any

import pytest

from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh import ProcessConfig, find_processes
from fornax.mesh.launchers import Launched, discover, first_host

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[007,009-012]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "3",
}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
TORCHRUN = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2"}
GKE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "w-0.svc,w-1.svc"}
SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job:8080",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "5"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("", None, None, None)),
        (JAX, ("JAX_ variables", "10.0.0.1:1234", 2, 1)),
        (TORCHRUN, ("MASTER_ADDR, WORLD_SIZE and RANK", "head:29500", 4, 2)),
        (SLURM, ("SLURM", f"gpu007:{61440 + 1234567 % 4096}", 8, 3)),
        (SLURM | {"JAX_COORDINATOR_PORT": "99"}, ("SLURM", "gpu007:99", 8, 3)),
        (SLURM | JAX, ("JAX_ variables", "10.0.0.1:1234", 2, 1)),
        (
            SLURM | {"JAX_COORDINATOR_ADDRESS": "other:5"},
            ("JAX_ variables and SLURM", "other:5", 8, 3),
        ),
        (GKE, ("Cloud TPU", "w-0.svc:8476", 2, 1)),
        (GKE | {"TPU_PROCESS_ADDRESSES": "a:8471,b:8471,c:8471"}, ("Cloud TPU", "a:8476", 3, 1)),
        (GKE | SLICES, ("Cloud TPU", "job-slice-0-0.job:8476", 6, 5)),
        (
            POD | {"JAX_NUM_PROCESSES": "8"},
            ("JAX_ variables and Kubernetes", "train-0.pods.ns.svc.cluster.local:8476", 8, 5),
        ),
        # No launcher of several processes: an allocation's own shell, one task, one TPU host (or
        # none: the compiler's variables), an indexed Job of independent pods.
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
            ("", None, None, None),
        ),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ("", None, None, None)),
        (TORCHRUN | {"WORLD_SIZE": "1"}, ("", None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, ("", None, None, None)),
        (POD, ("", None, None, None)),
    ],
)
def test_what_each_launcher_says(variables: dict[str, str], expected: tuple):
    found = discover(variables, hostname=lambda: "train-5.pods.ns.svc.cluster.local")
    assert (found.launcher, found.coordinator, found.num_processes, found.process_id) == expected


def test_what_is_given_wins_and_the_rest_is_filled():
    given = Launched(launcher="FORNAX_ variables", coordinator="here:1")
    found = discover(SLURM, given)
    assert (found.coordinator, found.num_processes, found.process_id) == ("here:1", 8, 3)
    assert found.launcher == "FORNAX_ variables and SLURM"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("login1,node[1-2]", "login1"),
        ("rack[1-2]-node[03-04]", "rack1-node03"),
        ("gpu[7]-ib", "gpu7-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str):
    assert first_host(hosts) == first


def test_a_step_with_one_task_on_each_host_has_its_devices_to_itself():
    assert discover(SLURM | {"SLURM_STEP_NUM_NODES": "8"}).alone_on_host
    assert not discover(SLURM | {"SLURM_STEP_NUM_NODES": "4"}).alone_on_host


def test_a_tpu_machine_without_variables_asks_its_metadata_server():
    told = {
        "agent-worker-number": "2",
        "worker-network-endpoints": "u:1:10.0.0.1,v:2:10.0.0.2,w:3:10.0.0.3,x:4:10.0.0.4",
        "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_NUM_SLICES: '2'\n"
        "MEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9:8080'\n",
    }
    found = discover({}, metadata=told.__getitem__)
    assert (found.coordinator, found.num_processes, found.process_id) == ("10.9.9.9:8476", 8, 6)


def test_a_number_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="SLURM_PROCID='three' is not a whole number"):
        discover(SLURM | {"SLURM_PROCID": "three"})


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Set the variables of one launcher."""

    def set_variables(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_commands_that_work_alone_do_not_look_for_launchers(only: Any):
    only(SLURM)
    assert find_processes(None) == Launched()
    assert find_processes(ProcessConfig()).num_processes == 8
    only({"FORNAX_NUM_PROCESSES": "1"})
    assert find_processes(ProcessConfig()).coordinator is None


def test_a_metadata_server_that_is_not_there_is_named(only: Any):
    from fornax.mesh.startup import _metadata

    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:9 does not say which"):
        _metadata("127.0.0.1:9", "agent-worker-number")
