"""An answer in the V2 protocol's JSON, its binary tensors behind it."""

import numpy as np
import orjson

from fornax.serving.types import InferResult
from fornax.serving.v2.datatypes import Raw, datatype_of, encode_raw, refuse
from fornax.serving.v2.json_tensors import to_json
from fornax.serving.v2.parameters import OutputOptions, RequestedOutputs

__all__ = ["classify", "encode"]


def encode(result: InferResult, wanted: RequestedOutputs) -> tuple[bytes, list[Raw]]:
    """The JSON, and the binary tensors that follow it; outputs in shared memory are put there.

    Raises ServingError for an output that cannot be given as it is wanted.
    """
    binary: list[Raw] = []
    documents = []
    if wanted.outputs:
        for spec in wanted.outputs:
            array = result.outputs[spec.name]
            options = spec.options
            if options.classes:
                array = classify(spec.name, array, options.classes)
            if options.span is not None:
                documents.append(_shared(spec.name, array, options))
            else:
                documents.append(_tensor(spec.name, array, spec.binary, binary))
    else:
        for name, array in result.outputs.items():
            documents.append(_tensor(name, array, wanted.binary, binary))
    document: dict[str, object] = {
        "model_name": result.model,
        "model_version": result.version,
        "outputs": documents,
    }
    if wanted.id:
        document["id"] = wanted.id
    if result.parameters:
        document["parameters"] = dict(result.parameters)
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), binary


def _tensor(name: str, array: np.ndarray, in_binary: bool, binary: list[Raw]) -> dict[str, object]:
    document: dict[str, object] = {
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


def _shared(name: str, array: np.ndarray, options: OutputOptions) -> dict[str, object]:
    """An output that goes to shared memory."""
    return {
        "name": name,
        "datatype": datatype_of(array.dtype),
        "shape": array.shape,
        "parameters": options.share(name, encode_raw(array)),
    }


def classify(name: str, array: np.ndarray, classes: int) -> np.ndarray:
    """The `classes` largest of each row, as BYTES elements `value:index`, largest first.

    Rows lie along the last axis: [..., n] becomes [..., min(classes, n)].

    Raises ServingError for an output without numbers.
    """
    if array.dtype.kind not in "iufV" or array.ndim == 0:
        raise refuse(f"output {name!r} is not a row of numbers; parameter classification needs one")
    # Negated so that ties keep their order; NaN comes last.
    order = np.argsort(-array.astype(np.float64), axis=-1, kind="stable")[..., :classes]
    values = np.take_along_axis(array, order, axis=-1).astype(np.float64)
    texts = np.empty(order.shape, np.object_)
    pairs = zip(values.ravel().tolist(), order.ravel().tolist(), strict=True)
    texts.reshape(-1)[:] = [f"{value:f}:{index}".encode() for value, index in pairs]
    return texts
