"""Batching the steps of requests beside one at a time: `python benchmarks/diffusion_serving.py`.

One process, one random DiT, the same engine with programs of one row and of several. Requests come
at random times (a Poisson process of a rate that the narrow engine cannot follow) with steps of
their own, so that they join one another midway; and all at once. Engines take turns, several times;
a cell is the median of the turns. Processor seconds are the process's own.
"""

import argparse
import queue
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import _harness
from fornax.diffusion import SAMPLERS, flow
from fornax.diffusion.models import Condition
from fornax.diffusion.models.transformer import DiTConfig, Transformer
from fornax.diffusion.pipelines import ImageRequest, Pipeline
from fornax.diffusion.server.engine import Done, Engine, Failed


def pipeline(width: int, layers: int, side: int) -> Pipeline:
    """A random DiT over pixels."""
    config = DiTConfig(
        channels=4, patch=2, num_layers=layers, num_heads=width // 64, head_dim=64, classes=1000
    ).transformer()
    denoiser = Transformer(config, rngs=nnx.Rngs(0))
    return Pipeline(
        name="DiT",
        denoiser=denoiser,
        prediction="flow",
        schedule=lambda steps, shape: flow(steps),
        sampler=SAMPLERS["euler"],
        encode=lambda prompts, size, guidance: Condition(
            classes_B=jnp.asarray([1000 if p is None else int(p) for p in prompts])
        ),
        latent_shape=lambda size: (side, side, 4),
        decode=lambda x_BHWC: x_BHWC[..., :3],
        size=(side, side),
        scale=4.0,
    )


def serve(engine: Engine, requests: list[ImageRequest], waits: list[float]) -> dict[str, float]:
    """Draw all requests, each after a wait; images per second, latencies, processor seconds."""
    told: queue.Queue[tuple[int, float, object]] = queue.Queue()
    sent: dict[int, float] = {}
    began, processor = time.monotonic(), time.process_time()
    for number, (request, wait) in enumerate(zip(requests, waits, strict=True)):
        time.sleep(wait)
        sent[number] = time.monotonic()
        engine.submit(request, lambda what, n=number: told.put((n, time.monotonic(), what)))
    latencies = []
    while len(latencies) < len(requests):
        number, at, what = told.get(timeout=600)
        if isinstance(what, Failed):
            raise what.error
        if isinstance(what, Done):
            latencies.append(at - sent[number])
    seconds = time.monotonic() - began
    return {
        "images/s": len(requests) / seconds,
        "latency p50": statistics.median(latencies),
        "latency p95": float(np.quantile(latencies, 0.95)),
        "processor s": time.process_time() - processor,
    }


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--side", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    model = pipeline(given.width, given.layers, given.side)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model.denoiser)))
    random = np.random.default_rng(0)
    requests = [
        ImageRequest(prompt=str(random.integers(1000)), seed=i, steps=int(random.integers(4, 13)))
        for i in range(given.requests)
    ]
    engines = {rows: Engine(model, widths=(rows,)) for rows in given.rows}
    for engine in engines.values():
        engine.start([ImageRequest(prompt="0", steps=2)])
        while not engine.readiness().ready:
            time.sleep(0.05)
    alone = serve(engines[given.rows[0]], requests[:4], [0.0] * 4)
    arrivals = {
        "all at once": [0.0] * len(requests),
        "at random": list(random.exponential(0.5 / alone["images/s"], len(requests))),
    }
    rows_of_table = []
    for name, waits in arrivals.items():
        turns: dict[int, list[dict[str, float]]] = {rows: [] for rows in engines}
        for _ in range(given.turns):
            for rows, engine in engines.items():
                turns[rows].append(serve(engine, requests, waits))
        base = statistics.median(turn["images/s"] for turn in turns[given.rows[0]])
        for rows, seen in turns.items():
            middle = {key: statistics.median(turn[key] for turn in seen) for key in seen[0]}
            rows_of_table.append(
                [
                    name,
                    str(rows),
                    f"{middle['images/s']:.2f}",
                    f"{middle['images/s'] / base:.2f}",
                    f"{middle['latency p50']:.2f}",
                    f"{middle['latency p95']:.2f}",
                    f"{middle['processor s'] / len(requests):.3f}",
                ]
            )
    for engine in engines.values():
        engine.shutdown()
    header = [
        "requests come",
        "rows of a step",
        "images/s",
        "ratio",
        "latency p50, s",
        "latency p95, s",
        "processor s an image",
    ]
    text = "\n\n".join(
        [
            f"# Step batching: a DiT of {count / 1e6:.1f}M parameters, guided",
            f"{_harness.machine()}; {_harness.versions('jax', 'flax')}. {len(requests)} requests "
            f"of 4 to 12 steps on {given.side}x{given.side} latents; the median of {given.turns} "
            "turns, which engines take in rotation. Ratios are to one row per step.",
            _harness.table(header, rows_of_table),
        ]
    )
    print(text)
    print(_harness.write_results("diffusion-serving", text))


if __name__ == "__main__":
    main()
