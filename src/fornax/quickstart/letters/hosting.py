"""The denoise function, sealed, served, and asked: a letter drawn by a client of the server."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ServingError
from fornax.diffusion import SAMPLERS, guided, noised, sample
from fornax.diffusion.drawing import start_noise
from fornax.diffusion.exporting import export_denoiser
from fornax.diffusion.load import LoadedRun
from fornax.quickstart.child import child_server

if TYPE_CHECKING:
    from fornax.serving.grpc.client import Client

__all__ = ["MODEL", "PACKAGES", "export_run", "serve_and_draw"]

MODEL = "letters"
"""The model's name in the repository."""
PACKAGES = ("grpc", "prometheus_client", "uvicorn")
"""Packages of the extra `[serve]` that this needs."""


def export_run(run_dir: Path, repository: Path, prompts: int) -> dict[str, object]:
    """Seal the denoiser as version 1, for guidance over this many prompts; the result is JSON."""
    path = repository / MODEL / "1"
    manifest = export_denoiser(run_dir, path, batch=(2 * prompts,), overwrite=True)
    return {
        "bundle": str(path),
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "platforms": list(manifest.platforms),
    }


def serve_and_draw(
    run: LoadedRun, repository: Path, log: Path, prompts: list[str], *, steps: int, guidance: float
) -> dict[str, Any]:
    """Serve the repository, sample through it over gRPC and directly, stop it.

    Raises:
      EngineError: the server did not start, or did not stop cleanly; its log says why.
    """
    from fornax.diffusion.prompts import text_arrays
    from fornax.serving.grpc.client import Client

    schedule = run.schedule(steps)
    table = SAMPLERS[run.sample.sampler](schedule)
    arrays = text_arrays(run.facts.prompts, prompts)
    empty = text_arrays(run.facts.prompts, [""] * len(prompts))
    noise_BX = start_noise(0, len(prompts), run.shape)
    began = time.perf_counter()
    words = ("host", str(repository), "--http", "none", "--grpc", "127.0.0.1:0")
    times: list[float] = []
    listening = child_server(words, log, r"listens on grpc://(\S+)")
    with listening as server, Client(server.address) as client:
        server.wait_until(lambda: _ready(client))
        ready = time.perf_counter() - began

        def remote(x_BX: Any, time_B: Any, given: dict[str, Any]) -> np.ndarray:
            asked = time.perf_counter()
            inputs = {"x": x_BX, "time": time_B, **given}
            found = client.infer(MODEL, {k: np.asarray(v) for k, v in inputs.items()})
            times.append(time.perf_counter() - asked)
            return np.asarray(found["output"], np.float32)

        def network(x_BX: jax.Array, point: Any, given: dict[str, jax.Array]) -> jax.Array:
            shape = jax.ShapeDtypeStruct(x_BX.shape, jnp.float32)
            time_B = jnp.broadcast_to(point.t, x_BX.shape[:1])
            return jax.pure_callback(remote, shape, x_BX, time_B, given)

        served = sample(
            guided(network, arrays, empty, guidance),
            noised(schedule, noise_BX),
            table,
            prediction=run.objective.prediction,
        )
        served = np.asarray(served)
        exit_code = server.stop()
    own = run.draw(prompts, seed=0, steps=steps, guidance=guidance)
    return {
        "seconds_to_ready": round(ready, 2),
        "request_seconds": round(float(np.median(times)), 5),
        "requests": len(times),
        "exit_code": exit_code,
        "largest_difference": float(np.abs(served - own).max()),
        "images": served.tolist(),
    }


def _ready(client: "Client") -> bool:
    """Whether the model is compiled, checked and takes requests."""
    try:
        return client.ready(MODEL)
    except ServingError:
        return False
