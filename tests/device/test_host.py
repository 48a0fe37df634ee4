"""A sealed function hosted on the device answers over HTTP as it does in this process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.device.machine import ON_GPU

from fornax import export
from fornax.export import Spec
from fornax.serving.client import V2Client, wait_until_ready

WIDTH = 1024 if ON_GPU else 16


def _predict(params, x):
    return {"y": x @ params["w"]}


def test_a_hosted_bundle_answers_as_the_function_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((WIDTH, WIDTH), np.float32)
    export.save(
        tmp_path / "models" / "linear" / "1",
        {"predict": _predict},
        {"w": weight},
        inputs={"predict": {"x": Spec(("b", WIDTH), "float32")}},
        buckets={"b": [1, 8]},
        platforms=["cuda"] if ON_GPU else ["cpu", "cuda"],
    )
    x = rng.standard_normal((5, WIDTH), np.float32)
    expected = x.astype(np.float64) @ weight
    command = [sys.executable, "-m", "fornax", "host", str(tmp_path / "models"), "--http", "0"]
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=kept)
    with server:
        try:
            assert server.stderr is not None
            found = next(m for line in server.stderr if (m := re.search(r"http://([\d.:]+)", line)))
            host, _, port = found[1].rpartition(":")
            client = V2Client(address=(host, int(port)))
            assert wait_until_ready(client, 120)
            rows = {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}
            (output,) = client.post("/v2/models/linear/infer", {"inputs": [rows]})["outputs"]
            answer = np.asarray(output["data"]).reshape(x.shape)
        finally:
            server.terminate()
    difference = np.linalg.norm(answer - expected) / np.linalg.norm(expected)
    assert difference < 1e-3  # a GPU multiplies float32 in tf32
