"""An answer in the V2 protocol's JSON, its binary tensors behind it."""

from typing import Any

import numpy as np
import orjson

from fornax.serving.types import InferResult
from fornax.serving.v2.classify import classify
from fornax.serving.v2.datatypes import Raw, datatype_of, encode_raw, refuse
from fornax.serving.v2.json_tensors import to_json
from fornax.serving.v2.wanted import Output, Wanted

__all__ = ["encode"]


def encode(result: InferResult, wanted: Wanted) -> tuple[bytes, list[Raw]]:
    """The JSON, and the binary tensors that follow it; outputs in shared memory are put there.

    Raises ServingError for an output that cannot be given as it is wanted.
    """
    binary: list[Raw] = []
    documents = []
    if wanted.outputs:
        for spec in wanted.outputs:
            array = result.outputs[spec.name]
            if spec.classes:
                array = classify(spec.name, array, spec.classes)
            if spec.span is not None:
                documents.append(_share(spec, array))
            else:
                documents.append(_tensor(spec.name, array, spec.binary, binary))
    else:
        for name, array in result.outputs.items():
            documents.append(_tensor(name, array, wanted.binary, binary))
    document: dict[str, Any] = {
        "model_name": result.model,
        "model_version": result.version,
        "outputs": documents,
    }
    if wanted.id:
        document["id"] = wanted.id
    if result.parameters:
        document["parameters"] = dict(result.parameters)
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), binary


def _tensor(name: str, array: np.ndarray, in_binary: bool, binary: list[Raw]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": name,
        "datatype": datatype_of(array.dtype),
        "shape": array.shape,
    }
    if in_binary:
        raw = encode_raw(array)
        binary.append(raw)
        document["parameters"] = {"binary_data_size": len(raw)}
    else:
        document["data"] = to_json(name, array)
    return document


def _share(spec: Output, array: np.ndarray) -> dict[str, Any]:
    """Put an output into shared memory."""
    assert spec.span is not None
    assert spec.region is not None
    raw = encode_raw(array)
    if len(raw) > spec.span.byte_size:
        raise refuse(
            f"output {spec.name!r} has {len(raw)} bytes; shared_memory_byte_size leaves it "
            f"{spec.span.byte_size}"
        )
    spec.region.write(spec.span.offset, raw)
    parameters: dict[str, Any] = {
        "shared_memory_region": spec.span.region,
        "shared_memory_byte_size": len(raw),
    }
    if spec.span.offset:
        parameters["shared_memory_offset"] = spec.span.offset
    return {
        "name": spec.name,
        "datatype": datatype_of(array.dtype),
        "shape": array.shape,
        "parameters": parameters,
    }
