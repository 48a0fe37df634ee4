"""Write what the model-server benchmark hosts: a repository of bundles, and the right answers.

    python benchmarks/_model_server_bundles.py DIRECTORY mlp,recommender,encoder

Run in a process of its own, so that the benchmark's clients do without jax. The right answers come
from the functions themselves, at one bucket, whichever the servers choose.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

import _model_server_load as load
import _model_server_models as models


def write(folder: Path, names: list[str]) -> None:
    """Write `repository/NAME/1` and `NAME.npy` for each model that is not there yet."""
    for name in names:
        model = models.MODELS[name]
        reference = folder / f"{name}.npy"
        if reference.exists():
            continue
        write_bundle(folder / "repository" / name, model)
        np.save(reference, answers(model))


def write_bundle(path: Path, model: models.Model) -> None:
    """Seal the model as version 1 in a repository; the server's defaults do for the rest."""
    from fornax import export

    shutil.rmtree(path, ignore_errors=True)
    inputs = {}
    for name, (dtype, shape) in model.inputs.items():
        high = {"encoder": models.VOCABULARY - 1}.get(model.name, models.ROWS_A_TABLE - 1)
        low, high = (0, high) if dtype == "int32" else (None, None)
        lengths = "lengths" if name == model.ragged else None
        inputs[name] = export.Spec(shape, dtype, lengths=lengths, low=low, high=high)
    export.save(
        path / "1",
        {"predict": model.fn},
        model.params(),
        inputs={"predict": inputs},
        buckets={dim: list(sizes) for dim, sizes in model.buckets.items()},
        platforms=("cpu",),
        tolerance=1e-5,
        executables=True,
    )


def answers(model: models.Model) -> np.ndarray:
    """Return the output for each of the clients' requests."""
    import jax

    requests = model.requests(load.DISTINCT)
    if model.ragged:
        requests = [*requests, {model.ragged: np.ones((1, models.TOKENS), np.int32)}]
    compiled, params = jax.jit(model.fn), jax.device_put(model.params())
    most = max(model.buckets["b"]) // model.rows
    longest = requests[load.DISTINCT :]
    found = []
    for start in range(0, load.DISTINCT, most - len(longest)):
        batch = requests[start : min(start + most - len(longest), load.DISTINCT)]
        inputs = models.assemble(model, [*batch, *longest])
        output = np.asarray(compiled(params, **inputs)[model.output])
        found.append(output[: len(batch) * model.rows].reshape(len(batch), model.rows, -1))
    return np.concatenate(found)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2].split(","))
