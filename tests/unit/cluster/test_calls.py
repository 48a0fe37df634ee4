"""Functions on the hosts of a local cluster: real processes, kept from call to call."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fornax.cluster import Cluster
from fornax.config import ClusterError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=2) as cluster:
        yield cluster


def test_results_come_in_the_order_of_the_items(cluster: Cluster):
    base = 10  # a closure travels too
    slow_first = cluster.map(lambda n: time.sleep(0.2 if n == 0 else 0.0) or base + n, range(6))
    assert slow_first == [10, 11, 12, 13, 14, 15]
    assert cluster.map(len, []) == []


def test_every_host_works_and_none_is_this_process(cluster: Cluster, tmp_path: Path):
    def meet(number: int) -> int:
        """Return once both items are being worked on, which one host alone could not do."""
        (tmp_path / str(number)).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        return os.getpid()

    pids = cluster.map(meet, [1, 2])
    assert len({*pids, os.getpid()}) == 3
    assert set(cluster.map(lambda _: os.getpid(), range(4))) <= set(pids)


def test_what_a_function_keeps_in_a_module_is_there_at_the_next_call(cluster: Cluster):
    def remember(number: int) -> int:
        import fornax

        before = getattr(fornax, "remembered", 0)
        fornax.remembered = before + number  # pyrefly: ignore
        return before

    cluster.map(remember, [1, 1])
    assert sum(cluster.map(remember, [0, 0, 0, 0])) >= 1


def test_an_error_carries_its_traceback_and_the_cluster_works_on(cluster: Cluster):
    def fail(number: int) -> int:
        if number == 3:
            raise ValueError("three is not allowed")
        return number

    with pytest.raises(ClusterError, match=r"ValueError: three is not allowed .*item 3") as caught:
        cluster.map(fail, range(8))
    assert 'raise ValueError("three is not allowed")' in str(caught.value.__cause__)
    assert cluster.map(fail, [1, 2]) == [1, 2]


def test_a_function_that_ends_its_process_is_named(cluster: Cluster):
    with pytest.raises(ClusterError, match=r"ended with SIGKILL while it ran item 1"):
        cluster.map(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n else n, [0, 1])
    assert cluster.map(abs, [-1, -2]) == [1, 2]


def test_what_cannot_travel_is_refused(cluster: Cluster):
    with pytest.raises(ClusterError, match="cannot be sent to a host"):
        cluster.map(lambda _: None, [threading.Lock()])
    with pytest.raises(ClusterError, match="cannot pickle"):
        cluster.map(lambda _: threading.Lock(), [1])


def test_nothing_is_left_of_a_cluster():
    with Cluster(hosts=2) as cluster:
        pids = set(cluster.map(lambda _: time.sleep(0.1) or os.getpid(), range(2)))
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_cluster_without_hosts_is_refused():
    with pytest.raises(ClusterError, match="has none to run on"):
        Cluster(hosts=0)
