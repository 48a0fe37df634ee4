"""Metrics for an OpenTelemetry collector: what one reads in the messages of a run."""

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.integration.local_http import Handler, serving

from fornax.config.errors import ConfigError
from fornax.train.config import OpenTelemetryConfig
from fornax.train.opentelemetry import OpenTelemetry

Request: Any = ExportMetricsServiceRequest


def test_the_latest_record_is_sent_as_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A collector on a busy machine may be slow, and what is sent again would come twice.
    monkeypatch.setattr("fornax.train.opentelemetry._SEND_SECONDS", 240.0)
    messages: list[Any] = []

    class Collector(Handler):
        def answer(self, body: bytes) -> None:
            assert self.path == "/v1/metrics"
            messages.append(Request.FromString(body))
            self.send(200, b"", "application/x-protobuf")

    with serving(Collector) as address:
        config = OpenTelemetryConfig(endpoint=f"{address}/v1/metrics", seconds=3600.0)
        sink = OpenTelemetry(config, tmp_path / "my run")
        sink.write({"step": 1, "time": 10.5, "loss": 3.0, "eval/loss": 4.0, "skipped": False})
        sink.write({"step": 2, "time": 11.5, "loss": 2.0, "experts": [1, 2], "odd name": 5})
        sink.close()
    (message,) = messages
    (resource,) = message.resource_metrics
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == "fornax"
    assert about["service.instance.id"] == "my run"
    metrics = [one for scope in resource.scope_metrics for one in scope.metrics]
    found = {one.name: one.gauge.data_points[0] for one in metrics}
    values = {name: point.as_double or point.as_int for name, point in found.items()}
    assert values == {
        "fornax.train.step": 2,
        "fornax.train.loss": 2.0,
        "fornax.train.eval/loss": 4.0,
        "fornax.train.skipped": 0,
        "fornax.train.odd_name": 5,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpoint": "127.0.0.1:4317"}, "is not an address over HTTP"),
        ({"seconds": 0.0}, r"seconds=0\.0 must be above 0"),
    ],
)
def test_what_is_no_collector_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        OpenTelemetryConfig(**given)
