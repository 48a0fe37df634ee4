"""What a model server writes of itself, from its models' counters."""

from fornax.config.errors import ServingCode
from fornax.serving.statistics import ModelStatistics, ServerRows
from fornax.serving.types import Timing


def test_a_row_is_of_the_time_since_the_row_before() -> None:
    model = ModelStatistics(name="ranker", version="3", pending=2, memory_bytes=100)
    rows = ServerRows(lambda: [model])
    assert rows.row(1.0)["requests"] == 0
    timing = Timing(queue=2_000_000, compute_input=0, compute_infer=5_000_000, compute_output=0)
    for _ in range(4):
        model.answered(3, timing, 10_000_000)
    model.executed(16, 12, 12, 16, (0, 1, 0))
    model.failed(ServingCode.UNAVAILABLE, 1)
    found = rows.row(2.0)
    assert (found["requests"], found["failures"], found["pending"]) == (4, 1, 2)
    assert found["requests_per_second"] == 2.0
    assert (found["batch_rows"], found["batch_fill"]) == (12, 0.75)
    assert (found["request_seconds"], found["queue_seconds"]) == (0.01, 0.002)
    assert found["compute_seconds"] == 0.005
    assert found["models"] == {
        "ranker 3": {"requests": 4, "failures": 1, "rows": 12, "batches": 1, "pending": 2,
                     "memory_bytes": 100},
    }  # fmt: skip
    model.success = 0  # another version of it took its place
    assert rows.row(1.0)["requests_per_second"] == 0.0
