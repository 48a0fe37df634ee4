"""Contestant: LitServe, each model a LitAPI with its own path, batching and worker process.

Bodies and answers are bytes (no JSON), batches take whatever waits (`batch_timeout=0`), answers
come back over ZeroMQ (`fast_queue`).
"""

import argparse
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import litserve
import numpy as np
from fastapi import Depends, Request, Response

import _model_server_models as models
import _model_server_wire as wires

Batch = tuple[int, dict[str, np.ndarray]]


async def read(request: Request) -> bytes:
    """Return the body as it came."""
    return await request.body()


class Api(litserve.LitAPI):
    """One model."""

    def __init__(self, model: models.Model) -> None:
        self.name = model.name
        most = max(model.buckets["b"]) // model.rows
        super().__init__(max_batch_size=most, batch_timeout=0.0, api_path=f"/{model.name}")

    def setup(self, device: str) -> None:
        self.model = models.MODELS[self.name]
        self.run = models.jitted(self.model)

    def decode_request(self, request: Annotated[bytes, Depends(read)]) -> dict[str, np.ndarray]:
        return wires.read_raw(self.model, request)

    def batch(self, inputs: list[dict[str, np.ndarray]]) -> Batch:
        return len(inputs), models.assemble(self.model, inputs)

    def predict(self, x: Batch) -> list[np.ndarray]:
        count, inputs = x
        output, rows = self.run(inputs), self.model.rows
        return [output[n * rows : (n + 1) * rows] for n in range(count)]

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--models", required=True)
    args = parser.parse_args()
    apis = [Api(models.MODELS[name]) for name in args.models.split(",")]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=args.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
