"""The floor of the model-server benchmark: each model's compiled program alone, as JSON.

    python benchmarks/_model_server_bare.py DIRECTORY mlp,recommender,encoder

Times one call for each of the clients' requests: padded arrays in, arrays out, nothing else, run in
the thread that calls, as the server does.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import _model_server_load as load
import _model_server_models as models

SECONDS = 2.0


def times(folder: Path, model: models.Model) -> list[float]:
    """Return microseconds of calls to the bundle's programs, one request at a time."""
    from fornax import export

    bundle = export.open_bundle(folder / "repository" / model.name / "1")
    weights = bundle.load_weights()
    programs, calls = {}, []
    for request in model.requests(load.DISTINCT):
        inputs = models.assemble(model, [request])
        dims = {"b": len(next(iter(inputs.values())))}
        if model.ragged:
            dims["t"] = inputs[model.ragged].shape[1]
        key = tuple(dims.items())
        if key not in programs:
            programs[key] = bundle.compile("predict", dims, weights)
        calls.append((programs[key], inputs))
    taken: list[float] = []
    limit = time.perf_counter() + SECONDS
    while time.perf_counter() < limit or len(taken) < 3 * len(calls):
        for program, inputs in calls:
            start = time.perf_counter()
            np.asarray(program(inputs)[model.output])
            taken.append(1e6 * (time.perf_counter() - start))
    return taken[len(calls) :]


if __name__ == "__main__":
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    found = {}
    for name in sys.argv[2].split(","):
        found[name] = {"us": [round(us, 1) for us in times(Path(sys.argv[1]), models.MODELS[name])]}
    print(json.dumps(found))
