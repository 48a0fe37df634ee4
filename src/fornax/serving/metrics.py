"""Metrics in Prometheus's text format, made from the models' counters when somebody asks.

Names that begin with `nv_` are Triton's and mean what they mean there: counters without `_total`,
durations in microseconds summed over requests. Names that begin with `fornax_` are ours.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fornax.serving.events import Events, StateChange
from fornax.serving.execution.counters import ModelStatistics
from fornax.serving.families import (
    Family,
    batches,
    device_memory,
    latencies,
    machine,
    shadows,
    triton,
)
from fornax.serving.latencies import Latencies
from fornax.serving.lifecycle.states import IndexEntry

__all__ = ["CONTENT_TYPE", "Metrics", "Source"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")


class Source(Protocol):
    """What is asked at each scrape; the host."""

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        """Counters of every loaded version."""

    def index(self, ready_only: bool = False) -> Sequence[IndexEntry]:
        """Every version and its state."""

    def shadow_reports(self) -> Sequence[Mapping[str, Any]]:
        """Of every model with shadow traffic, what it found."""


class Metrics:
    """The server's metrics."""

    def __init__(
        self,
        source: Source,
        events: Events,
        *,
        memory: Any = None,
        entries: Iterable[Any] = (),
    ):
        """`memory` accounts for the devices' memory; `entries` have metrics of their own."""
        self._source, self._events, self._memory = source, events, memory
        self._entries = list(entries)
        self._load_seconds: dict[tuple[str, str], float] = {}
        self.latencies = Latencies()
        """Its `finished` is to be told of requests."""
        events.states += [self._changed, self.latencies.changed]

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        lines = [line for family in self._families() for line in family.lines()]
        lines += latencies(self.latencies)
        text = "\n".join(lines).encode() + b"\n"
        return text + _libraries(self._entries), CONTENT_TYPE

    def _changed(self, change: StateChange) -> None:
        key = (change.name, change.version)
        if change.state == "READY":
            self._load_seconds[key] = change.seconds
        else:
            self._load_seconds.pop(key, None)

    def _families(self) -> Iterator[Family]:
        models = list(self._source.statistics())
        yield from triton(models)
        yield from batches(models)
        yield from self._server(models)
        yield from shadows(self._source.shadow_reports())
        if self._memory is not None:
            yield from device_memory(self._memory)
        yield from machine()

    def _server(self, models: Sequence[ModelStatistics]) -> Iterator[Family]:
        index = self._source.index()
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
                for (protocol, code), count in sorted(self._events.refusals.items())
            ],
        )
        yield Family(
            "fornax_compilations_after_ready_total",
            "counter",
            "Programs compiled while models served; more than 0 is a defect.",
            [({}, sum(each.compilations_after_ready for each in models))],
        )


def _libraries(entries: Sequence[Any]) -> bytes:
    """The process's own metrics, and those of entries; families of one name are joined."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.registry import Collector

    class Joined(Collector):
        def collect(self) -> Iterable[Any]:
            families: dict[str, Any] = {}
            for entry in entries:
                for family in entry.collect():
                    if family.name in families:
                        families[family.name].samples += family.samples
                    else:
                        families[family.name] = family
            return families.values()

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(Joined())
    return generate_latest(registry)
