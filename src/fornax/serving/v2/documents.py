"""What the server tells of itself and its models, as Triton's clients read it: plain JSON.

gRPC fills its messages from the same documents.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from fornax import __version__
from fornax.export.dtypes import BYTES, numpy_dtype
from fornax.export.spec import Signature, TensorSpec
from fornax.serving.settings import All, Latest, ModelSettings, Replicas
from fornax.serving.statistics import BatchCount, Counters, ModelStatistics
from fornax.serving.types import IndexEntry, ModelMetadata, TensorMetadata
from fornax.serving.v2.datatypes import datatype_of
from fornax.serving.v2.shared_memory import Region

__all__ = [
    "EXTENSIONS",
    "index",
    "model_config",
    "model_metadata",
    "regions",
    "server_metadata",
    "signature_metadata",
    "statistics",
]

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


def server_metadata() -> dict[str, object]:
    """Who answers, and what it can do beyond the protocol."""
    return {"name": "fornax", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(metadata: ModelMetadata) -> dict[str, object]:
    """A model's tensors."""
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(each) for each in metadata.inputs],
        "outputs": [_tensor(each) for each in metadata.outputs],
    }


def _tensor(tensor: TensorMetadata) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def index(entries: Iterable[IndexEntry]) -> Sequence[Mapping[str, object]]:
    """The repository, a version a line."""
    return [dataclasses.asdict(each) for each in entries]


def statistics(models: Iterable[ModelStatistics]) -> dict[str, object]:
    """What models have done."""
    return {"model_stats": [_model(each) for each in models]}


def _model(stats: ModelStatistics) -> dict[str, object]:
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


def _requests(stats: Counters) -> dict[str, object]:
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


def _batch(rows: int, batch: BatchCount) -> dict[str, object]:
    def executed(nanoseconds: int) -> dict[str, int]:
        return {"count": batch.count, "ns": nanoseconds}

    return {
        "batch_size": rows,
        "compute_input": executed(batch.compute_input_ns),
        "compute_infer": executed(batch.compute_infer_ns),
        "compute_output": executed(batch.compute_output_ns),
    }


def regions(known: Iterable[Region]) -> list[dict[str, object]]:
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


PLATFORM = "fornax_stablehlo"


def signature_metadata(name: str, versions: Iterable[str], signature: Signature) -> ModelMetadata:
    """The tensors of a function, as the V2 protocol names them."""
    return ModelMetadata(
        name=name,
        versions=tuple(versions),
        platform=PLATFORM,
        inputs=tuple(map(_tensor_metadata, signature.inputs.values())),
        outputs=tuple(map(_tensor_metadata, signature.outputs.values())),
    )


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    shape = tuple(-1 if isinstance(size, str) else size for size in spec.shape)
    if spec.dtype == BYTES:  # the last dimension is a string's length, which clients do not see
        return TensorMetadata(spec.name, "BYTES", shape[:-1])
    return TensorMetadata(spec.name, datatype_of(numpy_dtype(spec.dtype)), shape)


def model_config(
    name: str,
    signature: Signature,
    functions: Iterable[str],
    settings: ModelSettings,
    loaded: ModelSettings,
) -> dict[str, object]:
    """A function's configuration in Triton's words, as far as they mean the same here.

    Args:
      functions: names of all functions of its model.
      settings: the model's now; `loaded`: those that the version was loaded with.
    """
    batching = loaded.batching_of(signature.name)
    metadata = signature_metadata(name, (), signature)
    largest = _largest_batch(signature)
    skipped = 1 if largest else 0
    devices = loaded.devices
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": "fornax",
        "version_policy": _policy(settings),
        "max_batch_size": min(largest, batching.max_rows or largest),
        "input": [_config_tensor(each, skipped) for each in metadata.inputs],
        "output": [_config_tensor(each, skipped) for each in metadata.outputs],
        "instance_group": [
            {
                "name": name,
                "kind": "KIND_MODEL",
                "count": 1 if not isinstance(devices, Replicas) else max(devices.count, 1),
                "gpus": list(devices.devices),
            }
        ],
        "dynamic_batching": {
            "preferred_batch_size": list(batching.preferred_sizes),
            "max_queue_delay_microseconds": int(batching.max_delay_ms * 1000),
            "priority_levels": batching.priority_levels,
            "default_priority_level": batching.default_priority,
            "default_queue_policy": {"max_queue_size": batching.queue_limit},
        },
        "parameters": {
            "function": {"string_value": signature.name},
            "functions": {"string_value": ",".join(functions)},
            "buckets": {
                "string_value": ";".join(
                    f"{dim}={','.join(map(str, sizes))}" for dim, sizes in signature.buckets.items()
                )
            },
        },
    }


def _largest_batch(signature: Signature) -> int:
    """The largest batch bucket, where every tensor begins with the batch; else 0, as in Triton."""
    if signature.batch is None:
        return 0
    tensors = (*signature.inputs.values(), *signature.outputs.values())
    if any(not spec.shape or spec.shape[0] != signature.batch for spec in tensors):
        return 0
    return max(signature.buckets[signature.batch])


def _config_tensor(tensor: TensorMetadata, skipped: int) -> dict[str, object]:
    kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return {
        "name": tensor.name,
        "data_type": f"TYPE_{kind}",
        "dims": list(tensor.shape[skipped:]),
    }


def _policy(settings: ModelSettings) -> dict[str, object]:
    policy = settings.versions
    if isinstance(policy, Latest):
        return {"latest": {"num_versions": policy.count}}
    if isinstance(policy, All):
        return {"all": {}}
    return {"specific": {"versions": list(policy.versions)}}
