"""Contestant: BentoML, one service with a batchable API for each model, in one worker.

Its main server takes arrays in JSON (it refuses pickles there); ragged rows are lists, the
recommender's two inputs travel as one array, because a batchable API has one argument. Batches are
sized by its own estimate of what keeps `max_latency_ms`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bentoml
import numpy as np
from bentoml.validators import DType

import _model_server_models as models

MOST = {name: max(model.buckets["b"]) for name, model in models.MODELS.items()}
NAMES = os.environ.get("FORNAX_BENCH_MODELS", "mlp").split(",")
Floats = Annotated[np.ndarray, DType("float32")]


@bentoml.service(
    workers=1,
    traffic={"timeout": 60, "max_concurrency": 1024},
    logging={"access": {"enabled": False}},
)
class Models:
    """All models."""

    def __init__(self) -> None:
        self._run = {name: models.jitted(models.MODELS[name]) for name in NAMES}

    def _answer(self, name: str, request: dict[str, np.ndarray]) -> np.ndarray:
        inputs = models.assemble(models.MODELS[name], [request])
        return self._run[name](inputs)[: len(next(iter(request.values())))]

    @bentoml.api(batchable=True, max_batch_size=MOST["mlp"], max_latency_ms=1000)
    def mlp(self, x: Floats) -> Floats:
        return self._answer("mlp", {"x": x})

    @bentoml.api(batchable=True, max_batch_size=MOST["recommender"], max_latency_ms=1000)
    def recommender(self, rows: Floats) -> Floats:
        dense, ids = rows[:, : models.DENSE], rows[:, models.DENSE :].astype(np.int32)
        return self._answer("recommender", {"dense": dense, "ids": ids})

    @bentoml.api(batchable=True, max_batch_size=MOST["encoder"], max_latency_ms=10000)
    def encoder(self, ids: list[list[int]]) -> Floats:
        requests = [{"ids": np.asarray([row], np.int32)} for row in ids]
        model = models.MODELS["encoder"]
        return self._run["encoder"](models.assemble(model, requests))[: len(ids)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", required=True)
    parser.add_argument("--models", required=True)
    args = parser.parse_args()
    os.environ |= {"FORNAX_BENCH_MODELS": args.models, "BENTOML_DO_NOT_TRACK": "True"}
    os.chdir(Path(__file__).parent)
    command = [sys.executable, "-m", "bentoml", "serve", "serve_bentoml:Models"]
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", args.port])
