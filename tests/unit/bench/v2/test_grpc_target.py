"""`fornax bench host` over gRPC, against the server's own front."""

import pytest
from tests.unit.serving.grpc.conftest import Served

from fornax.bench import HostBenchConfig, bench_host, figures
from fornax.config import ServingError


@pytest.fixture(scope="module")
def served():
    served = Served()
    yield served
    served.close()


def _config(served, **changes):
    fields = {"protocol": "grpc", "model": "echo", "url": served.address, "seconds": 1.0}
    return HostBenchConfig(**{**fields, "processes": 1, "concurrency": (20,), **changes})


def test_every_answer_is_counted_and_the_servers_counters_read(served):
    served.host.requests.clear()
    (measured,) = bench_host(_config(served, rows=3, parameters={"seed": 2, "flag": True}))
    found = figures(measured)
    assert found["failed"] == 0
    assert 0 < found["requests"] <= len(served.host.requests)
    assert found["rows_per_second"] == pytest.approx(3 * found["requests_per_second"])
    request = served.host.requests[-1]
    assert request.inputs["x"].shape == (3, 4)
    assert request.parameters == {"seed": 2, "flag": True}
    assert measured.server is not None


def test_failures_are_counted_by_status(served):
    slow = {"seconds": "600"}
    (measured,) = bench_host(_config(served, model="slow", parameters=slow, timeout=0.1))
    assert measured.counts.errors.keys() <= {"timeout", "DEADLINE_EXCEEDED"}
    assert len(measured.counts.latencies) == 0


def test_no_such_model_is_one_paragraph(served):
    with pytest.raises(ServingError, match="Name another with --url"):
        list(bench_host(_config(served, model="nobody")))
