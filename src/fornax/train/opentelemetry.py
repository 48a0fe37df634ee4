"""A run's latest numbers for an OpenTelemetry collector. A module of its own: its packages are in
the extra otel."""

import re
from pathlib import Path
from typing import Any

from fornax import __version__
from fornax.config.errors import ConfigError
from fornax.train.config import OpenTelemetryConfig
from fornax.train.metrics import Record, numbers

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
except ImportError as error:
    raise ConfigError(
        "log.opentelemetry is set and the packages of OpenTelemetry are not installed; install "
        "`fornax-ai[otel]`, or remove log.opentelemetry"
    ) from error

__all__ = ["OpenTelemetry"]

_UNFIT = re.compile(r"[^-_./a-zA-Z0-9]")
_SEND_SECONDS = 3.0
"""How long a collector may take, retries included; at the end no longer is waited for it."""


class OpenTelemetry:
    """A gauge for each number of the latest record, `fornax.train.` and its name, of the resource
    `service.name=fornax` with the run's name as `service.instance.id`. A thread sends them."""

    def __init__(self, config: OpenTelemetryConfig, run_dir: Path) -> None:
        """Begin to send."""
        resource = Resource.create(
            {
                "service.name": "fornax",
                "service.version": __version__,
                "service.instance.id": run_dir.resolve().name,
            }
        )
        exporter = OTLPMetricExporter(endpoint=config.endpoint, timeout=_SEND_SECONDS)
        reader = PeriodicExportingMetricReader(
            exporter, export_interval_millis=1e3 * config.seconds
        )
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("fornax.train", __version__)
        self._gauges: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        """Send this record's numbers from now on; those that it has not stay as they were."""
        for name, value in (("step", record["step"]), *numbers(record)):
            if name not in self._gauges:
                path = f"fornax.train.{_UNFIT.sub('_', name)}"
                self._gauges[name] = self._meter.create_gauge(path)
            self._gauges[name].set(value)

    def rewind(self, step: int) -> None:
        """Nothing: the steps after `step` come again, and their numbers with them."""

    def close(self) -> None:
        """Send the last record."""
        self._provider.shutdown()
