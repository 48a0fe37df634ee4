"""Contestant: Ray Serve, each model a deployment of one replica with `serve.batch`.

Bodies and answers are bytes; a batch takes whatever waits (`batch_wait_timeout_s=0`).
"""

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response

import _model_server_models as models
import _model_server_wire as wires


def deployment(name: str):
    """Return the deployment of model `name`."""
    model = models.MODELS[name]
    most = max(model.buckets["b"]) // model.rows

    @serve.deployment(
        name=name, num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.5}
    )
    class Replica:
        def __init__(self) -> None:
            self.model = models.MODELS[name]
            self.run = models.jitted(self.model)

        @serve.batch(max_batch_size=most, batch_wait_timeout_s=0.0, max_concurrent_batches=1)
        async def batch(self, requests: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
            output = self.run(models.assemble(self.model, requests))
            rows = self.model.rows
            return [output[n * rows : (n + 1) * rows] for n in range(len(requests))]

        async def __call__(self, request: Request) -> Response:
            output = await self.batch(wires.read_raw(self.model, await request.body()))
            return Response(output.tobytes(), media_type="application/octet-stream")

    return Replica.bind()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--models", required=True)
    args = parser.parse_args()
    here = os.pathsep.join(sys.path[:2])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=args.port))
    for model in args.models.split(","):
        serve.run(deployment(model), name=model, route_prefix=f"/{model}")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
