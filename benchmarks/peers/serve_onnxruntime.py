"""Contestant: ONNX Runtime, behind a small server of the same kind (uvicorn, raw ASGI, batches).

Two threads inside an operator and no others; batch and length are free, so that a batch is padded
to its longest row and no further.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _onnx_models
import numpy as np
import onnxruntime
from _front_end import Run, serve

import _model_server_models as models


def join(model: models.Model, requests: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack the rows; ragged ones padded to the longest."""
    if not model.ragged:
        if len(requests) == 1:
            return requests[0]
        return {name: np.concatenate([r[name] for r in requests]) for name in model.inputs}
    rows = [request[model.ragged][0] for request in requests]
    lengths = np.array([len(row) for row in rows], np.int32)
    out = np.zeros((len(rows), lengths.max()), np.int32)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return {model.ragged: out, "lengths": lengths}


def runtimes(names: list[str]) -> dict[str, Run]:
    """Return a session's run for each model, from a graph written beforehand or now."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.inter_op_num_threads = 1
    runs = {}
    for name in names:
        path = Path(tempfile.gettempdir()) / "fornax-model-server" / f"{name}.onnx"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            _onnx_models.write(name, path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        output = [models.MODELS[name].output]
        runs[name] = lambda inputs, run=session.run, output=output: run(output, inputs)[0]
    return runs


if __name__ == "__main__":
    serve(runtimes, join)
