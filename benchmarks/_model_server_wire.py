"""How each contestant of the model-server benchmark is asked and answers, as bytes on a connection.

`v2-binary` is the open inference protocol with binary tensors, `v2-json` the same with its data in
JSON, `raw` the tensors' bytes one after another, `json` plain lists of numbers.
"""

import json
from collections.abc import Mapping

import numpy as np

import _model_server_models as models

DATATYPES = {"float32": "FP32", "int32": "INT32"}


def request(wire: str, model: models.Model, inputs: Mapping[str, np.ndarray], path: str) -> bytes:
    """Return one HTTP/1.1 request, head and body."""
    headers, body = _BODIES[wire](model, inputs)
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def answer(wire: str, model: models.Model, headers: Mapping[str, str], body: bytes) -> np.ndarray:
    """Return the output in an answer, one row each row of the request."""
    array = _ANSWERS[wire](headers, body)
    return array.reshape(model.rows, -1)


def _v2_binary(model: models.Model, inputs: Mapping[str, np.ndarray]) -> tuple[dict, bytes]:
    document = {
        "inputs": [
            {
                "name": name,
                "datatype": DATATYPES[array.dtype.name],
                "shape": array.shape,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in inputs.items()
        ],
        "outputs": [{"name": model.output, "parameters": {"binary_data": True}}],
    }
    head = _dump(document)
    headers = {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Type": "application/octet-stream",
    }
    return headers, head + b"".join(array.tobytes() for array in inputs.values())


def _v2_json(model: models.Model, inputs: Mapping[str, np.ndarray]) -> tuple[dict, bytes]:
    """Ragged rows are padded here, with their lengths beside: batches are merged by shape."""
    document = {
        "inputs": [
            {
                "name": name,
                "datatype": DATATYPES[array.dtype.name],
                "shape": array.shape,
                "data": _numbers(array).tolist(),
            }
            for name, array in padded(model, inputs).items()
        ]
    }
    return {"Content-Type": "application/json"}, json.dumps(
        document, separators=(",", ":")
    ).encode()


def padded(model: models.Model, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs whose shapes are those of any other request."""
    if not model.ragged:
        return dict(inputs)
    array = inputs[model.ragged]
    full = np.zeros((len(array), models.TOKENS), array.dtype)
    full[:, : array.shape[1]] = array
    return {model.ragged: full, "lengths": np.full((len(array), 1), array.shape[1], np.int32)}


def _raw(_: models.Model, inputs: Mapping[str, np.ndarray]) -> tuple[dict, bytes]:
    headers = {"Content-Type": "application/octet-stream"}
    return headers, b"".join(array.tobytes() for array in inputs.values())


def read_raw(model: models.Model, body: bytes) -> dict[str, np.ndarray]:
    """Return the inputs in a raw body: what a peer's handler does with it."""
    inputs, at = {}, 0
    for name, (dtype, shape) in model.inputs.items():
        sizes = [model.rows, *(size if isinstance(size, int) else -1 for size in shape[1:])]
        count = int(np.prod(sizes)) if min(sizes) > 0 else -1
        inputs[name] = np.frombuffer(body, dtype, count, at).reshape(sizes)
        at += inputs[name].nbytes
    return inputs


def _json(model: models.Model, inputs: Mapping[str, np.ndarray]) -> tuple[dict, bytes]:
    """One argument, as BentoML's batchable APIs take: several inputs are joined to one array."""
    if len(inputs) > 1:
        inputs = {"rows": np.concatenate([a.astype(np.float32) for a in inputs.values()], axis=1)}
    lists = {name: _numbers(array).reshape(array.shape).tolist() for name, array in inputs.items()}
    return {"Content-Type": "application/json"}, _dump(lists)


def _dump(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _numbers(array: np.ndarray) -> np.ndarray:
    """Return the values such that JSON writes no more digits than they have."""
    if array.dtype.kind == "i":
        return array.ravel()
    return np.array([float(str(value)) for value in array.ravel()])


def _binary_answer(headers: Mapping[str, str], body: bytes) -> np.ndarray:
    head = int(headers["inference-header-content-length"])
    (output,) = json.loads(body[:head])["outputs"]
    assert output["datatype"] == "FP32"
    return np.frombuffer(body[head:], np.float32)


def _json_answer(_: Mapping[str, str], body: bytes) -> np.ndarray:
    (output,) = json.loads(body)["outputs"]
    return np.asarray(output["data"], np.float32)


_BODIES = {"v2-binary": _v2_binary, "v2-json": _v2_json, "raw": _raw, "json": _json}
_ANSWERS = {
    "v2-binary": _binary_answer,
    "v2-json": _json_answer,
    "raw": lambda _, body: np.frombuffer(body, np.float32),
    "json": lambda _, body: np.asarray(json.loads(body), np.float32),
}
