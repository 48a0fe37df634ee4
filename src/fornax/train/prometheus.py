"""A run's latest numbers for Prometheus. A module of its own: its package is in the extra serve."""

import re
from collections.abc import Iterator
from pathlib import Path

from fornax.config.errors import ConfigError
from fornax.train.config import PrometheusConfig
from fornax.train.metrics import Record, numbers

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily
except ImportError as error:
    raise ConfigError(
        "log.prometheus is set and the package `prometheus_client` is not installed; install "
        "`fornax-ai[serve]`, or remove log.prometheus"
    ) from error

__all__ = ["Prometheus"]

_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


class Prometheus:
    """`/metrics` with a gauge for each number of the latest record, `fornax_train_` and its name,
    labelled with the run."""

    def __init__(self, config: PrometheusConfig, run_dir: Path) -> None:
        """Listen.

        Raises:
          ConfigError: when the address is not to be had.
        """
        self._run = run_dir.resolve().name
        self._record: Record = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise ConfigError(
                f"log.prometheus cannot listen on {config.host}:{config.port}: "
                f"{error.strerror or error}; give another port, or 0 for any that is free"
            ) from error
        self.address = f"http://{config.host}:{self._server.server_port}/metrics"
        """Where it is."""

    def write(self, record: Record) -> None:
        """Show this record from now on; numbers that it has not stay as they were."""
        self._record = {**self._record, **record}

    def rewind(self, step: int) -> None:
        """Show nothing of steps after `step`: no number, until there is a record again."""
        self._record = {}

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The latest record, as prometheus_client asks for it."""
        record = self._record
        if "step" not in record:
            return
        shown = {"step": float(record["step"]), "time_seconds": float(record["time"])}
        for name, value in numbers(record):
            shown.setdefault(_UNFIT.sub("_", name), value)
        for name, value in shown.items():
            family = GaugeMetricFamily(
                f"fornax_train_{name}", f"{name} of the latest record.", labels=["run"]
            )
            family.add_metric([self._run], value)
            yield family
