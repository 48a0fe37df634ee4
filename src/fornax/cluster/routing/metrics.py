"""What the router's `/metrics` shows: its own figures, and those of every replica by number."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fornax.cluster.routing.pool import Replica, ReplicaPool

__all__ = ["RouterMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RouterMetrics:
    """The counters of one router."""

    def __init__(self, pool: ReplicaPool):
        """`pool` has the replicas whose requests and readiness are shown."""
        own = self._own = CollectorRegistry()
        self._requests = Counter(
            "fornax_router_requests", "Requests by who answered.", ("replica", "code"), registry=own
        )
        self._seconds = Histogram(
            "fornax_router_request_seconds", "Arrival to end.", buckets=_SECONDS, registry=own
        )
        self._retries = Counter(
            "fornax_router_retries", "Requests sent to another replica.", ("reason",), registry=own
        )
        self._cut = Counter(
            "fornax_router_cut_responses",
            "Responses whose replica ended before they were complete.",
            registry=own,
        )
        self._blocks = Counter(
            "fornax_router_prefix_blocks", "Blocks of prompts, 64 bytes each.", registry=own
        )
        self._matched = Counter(
            "fornax_router_prefix_blocks_matched",
            "Those that the chosen replica was sent before.",
            registry=own,
        )
        self._restarts = Counter(
            "fornax_router_replica_restarts",
            "Replicas started again.",
            ("replica", "reason"),
            registry=own,
        )
        own.register(_Replicas(pool))

    def request(self, replica: int | None, code: int | str, seconds: float) -> None:
        """A request has its response: an HTTP status, or the name of gRPC's."""
        shown = "none" if replica is None else str(replica)
        self._requests.labels(shown, str(code)).inc()
        self._seconds.observe(seconds)

    def chosen(self, *, matched: int, blocks: int) -> None:
        """A replica was chosen that had been sent `matched` of a prompt's blocks."""
        self._blocks.inc(blocks)
        self._matched.inc(matched)

    def retry(self, reason: str) -> None:
        """A request goes to another replica: `broken` or `refused`."""
        self._retries.labels(reason).inc()

    def cut(self) -> None:
        """A replica ended during a response."""
        self._cut.inc()

    def restarted(self, replica: int, reason: str) -> None:
        """A replica is started again."""
        self._restarts.labels(str(replica), reason).inc()

    def exposition(self, replicas: Mapping[Replica, str]) -> tuple[bytes, str]:
        """The body and content type of a scrape.

        Args:
          replicas: what their own `/metrics` say; each line gets the label `replica`.
        """
        theirs = CollectorRegistry(auto_describe=False)
        theirs.register(_Merged(replicas))
        return generate_latest(self._own) + generate_latest(theirs), CONTENT_TYPE_LATEST


class _Replicas(Collector):
    """What is read off the pool when it is asked for."""

    def __init__(self, pool: ReplicaPool):
        self._pool = pool

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        running = Metric("fornax_router_requests_running", "Requests being answered.", "gauge")
        ready = Metric("fornax_router_replica_ready", "Whether it takes requests.", "gauge")
        for each in list(self._pool.replicas.values()):
            label = {"replica": str(each.number)}
            running.add_sample(running.name, label, each.running)
            ready.add_sample(ready.name, label, float(each.phase == "ready"))
        yield running
        yield ready


class _Merged(Collector):
    """The families of all replicas, each of their samples labelled."""

    def __init__(self, texts: Mapping[Replica, str]):
        self._texts = texts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": str(replica.number)}
                    merged.add_sample(sample.name, labels, sample.value)
        yield from families.values()
