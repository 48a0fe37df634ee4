"""What the server tells of itself and its models, as Triton's clients read it: plain JSON.

gRPC fills its messages from the same documents.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from fornax import __version__
from fornax.serving.types import ModelMetadata
from fornax.serving.v2.shared_memory import Region

if TYPE_CHECKING:
    from fornax.serving.execution.counters import BatchCount, Counters, ModelStatistics

__all__ = ["EXTENSIONS", "index", "model_metadata", "regions", "server_metadata", "statistics"]

EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)
"""Triton's extensions of the protocol that this server has."""


class Indexed(Protocol):
    """A line of the repository's index."""

    @property
    def name(self) -> str:
        """The model's."""

    @property
    def version(self) -> str:
        """A number."""

    @property
    def state(self) -> str:
        """READY, LOADING, UNLOADING or UNAVAILABLE."""

    @property
    def reason(self) -> str:
        """Why it is not ready."""


def server_metadata() -> dict[str, Any]:
    """Who answers, and what it can do beyond the protocol."""
    return {"name": "fornax", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(metadata: ModelMetadata) -> dict[str, Any]:
    """A model's tensors."""
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(each) for each in metadata.inputs],
        "outputs": [_tensor(each) for each in metadata.outputs],
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def index(entries: Iterable[Indexed]) -> list[dict[str, Any]]:
    """The repository, a version a line."""
    return [
        {
            "name": each.name,
            "version": each.version,
            "state": str(each.state),
            "reason": each.reason,
        }
        for each in entries
    ]


def statistics(models: "Iterable[ModelStatistics]") -> dict[str, Any]:
    """What models have done."""
    return {"model_stats": [_model(each) for each in models]}


def _model(stats: "ModelStatistics") -> dict[str, Any]:
    return {
        "name": stats.name,
        "version": stats.version,
        "last_inference": stats.last_inference,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": _requests(stats),
        "batch_stats": [_batch(rows, each) for rows, each in sorted(stats.batches.items())],
        "memory_usage": [{"type": "DEVICE", "id": 0, "byte_size": stats.memory_bytes}],
    }


def _requests(stats: "Counters") -> dict[str, Any]:
    def answered(nanoseconds: int) -> dict[str, int]:
        return {"count": stats.success, "ns": nanoseconds}

    return {
        "success": answered(stats.request_ns),
        "fail": {"count": stats.failure, "ns": stats.fail_ns},
        "queue": answered(stats.queue_ns),
        "compute_input": answered(stats.compute_input_ns),
        "compute_infer": answered(stats.compute_infer_ns),
        "compute_output": answered(stats.compute_output_ns),
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }


def _batch(rows: int, batch: "BatchCount") -> dict[str, Any]:
    def executed(nanoseconds: int) -> dict[str, int]:
        return {"count": batch.count, "ns": nanoseconds}

    return {
        "batch_size": rows,
        "compute_input": executed(batch.compute_input_ns),
        "compute_infer": executed(batch.compute_infer_ns),
        "compute_output": executed(batch.compute_output_ns),
    }


def regions(known: Iterable[Region]) -> list[dict[str, Any]]:
    """Registered regions of shared memory."""
    return [
        {
            "name": each.name,
            "key": each.key,
            "offset": each.offset,
            "byte_size": each.byte_size,
        }
        for each in known
    ]
