"""Contestant: MLServer, each model a custom runtime with adaptive batching, in its own process.

Its REST side takes V2 with JSON data only. `parallel_workers` is 0, as its documentation advises
where inference does not hold the interpreter; `max_batch_time` is what each batch that is not full
waits.
"""

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

import _model_server_models as models


class Runtime(MLModel):
    """One model."""

    async def load(self) -> bool:
        self.model = models.MODELS[self.name]
        self.run = models.jitted(self.model)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        rows = len(next(iter(inputs.values())))
        if self.model.ragged:
            ids, lengths = inputs[self.model.ragged], inputs["lengths"][:, 0]
            requests = [
                {self.model.ragged: row[None, :n]} for row, n in zip(ids, lengths, strict=True)
            ]
        else:
            requests = [inputs]
        output = self.run(models.assemble(self.model, requests))[:rows]
        if output.ndim == 1:
            output = output[:, None]
        return InferenceResponse(
            model_name=self.name,
            outputs=[NumpyCodec.encode_output(self.model.output, np.asarray(output))],
        )


async def main(port: int, names: list[str]) -> None:
    settings = Settings(
        host="127.0.0.1",
        http_port=port,
        grpc_port=port + 1,
        metrics_port=port + 2,
        parallel_workers=0,
        use_structured_logging=False,
        debug=False,
        access_log=False,
    )
    server = MLServer(settings)
    found = []
    for name in names:
        model = models.MODELS[name]
        found.append(
            ModelSettings(
                name=name,
                implementation=Runtime,
                max_batch_size=max(model.buckets["b"]) // model.rows,
                max_batch_time=0.0005,
            )
        )
    await server.start(models_settings=found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--models", required=True)
    args = parser.parse_args()
    asyncio.run(main(args.port, args.models.split(",")))
