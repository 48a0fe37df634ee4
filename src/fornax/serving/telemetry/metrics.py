"""Metrics in Prometheus's text format, made from the models' counters when somebody asks.

Names that begin with `nv_` are Triton's and mean what they mean there: counters without `_total`,
durations in microseconds summed over requests. Names that begin with `fornax_` are ours.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fornax.serving.backend import Backend
from fornax.serving.events import StateChange
from fornax.serving.statistics import ModelStatistics
from fornax.serving.telemetry.families import (
    Family,
    Latencies,
    device_memory,
    functions,
    latencies,
    machine,
    models,
    shadows,
)

if TYPE_CHECKING:
    from fornax.serving.execution.devices import Memory
    from fornax.serving.host import Host

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")


class Metrics:
    """The server's metrics."""

    def __init__(self, host: "Host", memory: "Memory"):
        """`memory` accounts for the devices' memory."""
        self._host, self._memory = host, memory
        self._load_seconds: dict[tuple[str, str], float] = {}
        self.latencies = Latencies()
        """Its `finished` is to be notified of requests."""
        host.events.states += [self._changed, self.latencies.changed]

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        lines = [line for family in self._families() for line in family.lines()]
        lines += latencies(self.latencies)
        text = "\n".join(lines).encode() + b"\n"
        return text + _libraries(self._host.backends.values()), CONTENT_TYPE

    def _changed(self, change: StateChange) -> None:
        key = (change.name, change.version)
        if change.state == "READY":
            self._load_seconds[key] = change.seconds
        else:
            self._load_seconds.pop(key, None)

    def _families(self) -> Iterator[Family]:
        seen = list(self._host.statistics())
        yield from models(seen)
        yield from functions(seen)
        yield from self._server(seen)
        yield from shadows(self._host.shadows())
        yield from device_memory(self._memory)
        yield from machine()

    def _server(self, seen: Sequence[ModelStatistics]) -> Iterator[Family]:
        index = self._host.index()
        yield Family(
            "fornax_model_state",
            "gauge",
            "1 for the state that a version is in.",
            [
                ({"model": each.name, "version": each.version, "state": state}, each.state == state)
                for each in index
                for state in _STATES
            ],
        )
        yield Family(
            "nv_model_load_duration_secs",
            "gauge",
            "Seconds that a version took to load, verify and warm.",
            [
                ({"model": name, "version": version}, seconds)
                for (name, version), seconds in sorted(self._load_seconds.items())
            ],
        )
        yield Family(
            "fornax_refused_total",
            "counter",
            "Requests refused before a model saw them: bad bodies, missing tokens, too much.",
            [
                ({"protocol": protocol, "code": code}, count)
                for (protocol, code), count in sorted(self._host.events.refusals.items())
            ],
        )
        yield Family(
            "fornax_compilations_after_ready_total",
            "counter",
            "Programs compiled while models served; more than 0 is a defect.",
            [({}, sum(each.compilations_after_ready for each in seen))],
        )


class _Joined(Collector):
    """The metrics of backends; families of one name are joined."""

    def __init__(self, backends: Iterable[Backend]):
        self._backends = backends

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for backend in self._backends:
            for family in backend.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values()


def _libraries(backends: Iterable[Backend]) -> bytes:
    """The process's own metrics, and those of backends."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Joined(backends))
    return generate_latest(registry)
