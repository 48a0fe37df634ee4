"""The GPUs of replicas, from the environment."""

import pytest

from fornax.cluster.routing.replica import device_variables
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
