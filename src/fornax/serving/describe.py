"""What a served version says of itself: the V2 protocol's metadata and Triton's configuration."""

from collections.abc import Iterable
from typing import Any

from fornax.export.dtypes import BYTES, numpy_dtype
from fornax.export.spec import Signature, TensorSpec
from fornax.serving.lifecycle import Instance
from fornax.serving.settings import All, Latest, ModelSettings, Replicas
from fornax.serving.types import ModelMetadata, TensorMetadata
from fornax.serving.v2.datatypes import datatype_of

__all__ = ["PLATFORM", "model_config", "model_metadata"]

PLATFORM = "fornax_stablehlo"


def model_metadata(
    name: str, versions: Iterable[str], instance: Instance, function: str = ""
) -> ModelMetadata:
    """The tensors of a function, as the V2 protocol names them.

    Raises:
      ServingError: NOT_FOUND for a function that the version does not have.
    """
    signature = instance.servable.signature(function)
    return ModelMetadata(
        name=name,
        versions=tuple(versions),
        platform=PLATFORM,
        inputs=tuple(map(_tensor, signature.inputs.values())),
        outputs=tuple(map(_tensor, signature.outputs.values())),
    )


def _tensor(spec: TensorSpec) -> TensorMetadata:
    shape = tuple(-1 if isinstance(size, str) else size for size in spec.shape)
    if spec.dtype == BYTES:  # the last dimension is a string's length, which clients do not see
        return TensorMetadata(spec.name, "BYTES", shape[:-1])
    return TensorMetadata(spec.name, datatype_of(numpy_dtype(spec.dtype)), shape)


def model_config(
    name: str, instance: Instance, settings: ModelSettings, function: str = ""
) -> dict[str, Any]:
    """The model's configuration in Triton's words, as far as they mean the same here.

    Raises:
      ServingError: NOT_FOUND for a function that the version does not have.
    """
    signature = instance.servable.signature(function)
    loaded = instance.source.settings
    batching = loaded.batching_of(signature.name)
    metadata = model_metadata(name, (), instance, function)
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
            "functions": {"string_value": ",".join(instance.servable.functions)},
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


def _config_tensor(tensor: TensorMetadata, skipped: int) -> dict[str, Any]:
    kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return {
        "name": tensor.name,
        "data_type": f"TYPE_{kind}",
        "dims": list(tensor.shape[skipped:]),
    }


def _policy(settings: ModelSettings) -> dict[str, Any]:
    policy = settings.versions
    if isinstance(policy, Latest):
        return {"latest": {"num_versions": policy.count}}
    if isinstance(policy, All):
        return {"all": {}}
    return {"specific": {"versions": list(policy.versions)}}
