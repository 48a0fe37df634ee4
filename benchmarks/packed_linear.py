"""Products with packed weights against XLA's and PyTorch's, from one row to a thousand.

    python benchmarks/packed_linear.py [--sizes 512x1536 ...] [--rows 1 ...] [--write]

Weights are a stack of layers larger than the caches, read in turn, as a model reads them.
Contestants of a size take turns call by call; each figure is the best of them, and "share of read"
compares with the best plain read of the stack on all cores, timed between the calls. PyTorch is
left out where it is not installed.
"""

import argparse
import ctypes
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import _harness
from fornax import kernels

SIZES = ("512x1536", "1024x4096", "4096x4096", "512x32000")
ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 1024)
PRECISIONS = ("float32", "bfloat16", "int8", "fp8", "int4", "mxfp4")
STACK_BYTES = 512e6
"""Bytes of a stack in float32: several times the last cache."""
SECONDS = 1.5
"""How long the contestants of one number of rows take turns."""


@dataclass
class Contestant:
    """A way to multiply all layers of a stack with some rows."""

    name: str
    run: Callable[[jax.Array], None]
    layer_bytes: int
    """Bytes of weights that one layer's product reads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="INPUTSxOUTPUTS")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/…")
    args = parser.parse_args()
    sizes = [size.split("x") for size in args.sizes]
    lines = [measure(int(inputs), int(outputs), args.rows) for inputs, outputs in sizes]
    header = ("size", "rows", "contestant", "us", "GFLOP/s", "GB/s", "share of read", "x XLA f32")
    text = "\n".join(
        [
            "# Products with packed weights",
            "",
            f"{_harness.machine()}; {_harness.versions('jax', 'torch')}.",
            "",
            _harness.table(header, [row for rows in lines for row in rows]),
        ]
    )
    print(text)
    if args.write:
        print(_harness.write_results("packed-linear", text))


def measure(inputs: int, outputs: int, rows: list[int]) -> list[tuple[object, ...]]:
    """Return the table's lines of one size."""
    layers = max(1, int(STACK_BYTES / (4 * inputs * outputs)))
    w = jax.random.normal(jax.random.key(0), (layers, inputs, outputs)) / inputs**0.5
    contestants = [*_packed(w), _xla(w), *_torch(w)]
    read = _plain_read(np.asarray(w))
    lines: list[tuple[object, ...]] = []
    for count in rows:
        x = jax.random.normal(jax.random.key(1), (count, inputs))
        best, bandwidth = _take_turns(contestants, x, read)
        xla = best["XLA float32"]
        for c in contestants:
            seconds = best[c.name] / layers
            speed = c.layer_bytes / seconds
            flops = 2 * count * inputs * outputs / seconds
            lines.append(
                (
                    f"{inputs}x{outputs}",
                    count,
                    c.name,
                    f"{seconds * 1e6:.0f}",
                    f"{flops / 1e9:.0f}",
                    f"{speed / 1e9:.1f}",
                    f"{speed / bandwidth:.0%}",
                    f"{xla / best[c.name]:.2f}",
                )
            )
    return lines


def _take_turns(
    contestants: list[Contestant], x: jax.Array, read: Callable[[], float]
) -> tuple[dict[str, float], float]:
    """Return each contestant's best time, and the best bytes per second of a plain read."""
    for c in contestants:
        c.run(x)  # compiles
    best = {c.name: float("inf") for c in contestants}
    bandwidth = 0.0
    end, turns = time.perf_counter() + SECONDS, 0
    while turns < 3 or time.perf_counter() < end:
        for c in contestants:
            start = time.perf_counter()
            c.run(x)
            best[c.name] = min(best[c.name], time.perf_counter() - start)
        bandwidth = max(bandwidth, read())
        turns += 1
    return best, bandwidth


def _plain_read(array: np.ndarray) -> Callable[[], float]:
    """Return a function that reads an array on all cores and says at how many bytes per second.

    Every call reads all of it and reports its fastest eighth: that takes about as long as a
    contestant's call, so that on a busy machine both have the same chance of a quiet moment.
    """
    cores = os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores)
    total = _compiled_read()

    def speed(eighth: np.ndarray) -> float:
        parts = np.array_split(eighth, cores)
        start = time.perf_counter()
        list(pool.map(lambda part: total(part.ctypes.data, part.size // 64 * 64), parts))
        return eighth.nbytes / (time.perf_counter() - start)

    def read() -> float:
        return max(speed(eighth) for eighth in np.array_split(array.reshape(-1), 8))

    return read


_READ = """
typedef float vec __attribute__((vector_size(64), aligned(4)));
float total(const float* from, long count) {
  vec sums[4] = {};
  for (long i = 0; i < count; i += 64)
    for (int j = 0; j < 4; ++j) sums[j] += *(const vec*)(from + i + 16 * j);
  vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return all[0];
}
"""


@functools.cache
def _compiled_read() -> Callable[[int, int], float]:
    """Compile a loop that only reads; while it runs other Python threads may."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "read.c"), Path(folder, "read.so")
        source.write_text(_READ)
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        total = ctypes.CDLL(str(library)).total
    total.argtypes, total.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_float
    return total


def _packed(w: jax.Array) -> list[Contestant]:
    found = []
    for precision in PRECISIONS:
        packed = kernels.pack(w, precision=precision, stacked=True)

        @jax.jit
        def every_layer(packed: kernels.PackedWeight, x: jax.Array) -> jax.Array:
            def step(carry, layer):
                return packed.at(layer).linear(x + carry)[0, 0] * 1e-30, None

            return jax.lax.scan(step, jnp.float32(0), jnp.arange(packed.shape[0]))[0]

        def run(x: jax.Array, packed=packed, every_layer=every_layer) -> None:
            every_layer(packed, x).block_until_ready()

        name = f"{packed.implementation} {precision}"
        found.append(Contestant(name, run, packed.nbytes // w.shape[0]))
    return found


def _xla(w: jax.Array) -> Contestant:
    """XLA's product; the layers are arrays of their own, so that it copies none of them."""
    layers = list(w)

    @jax.jit
    def every_layer(layers: list[jax.Array], x: jax.Array) -> jax.Array:
        carry = jnp.float32(0)
        for layer in layers:
            carry = ((x + carry) @ layer)[0, 0] * 1e-30
        return carry

    return Contestant(
        "XLA float32", lambda x: every_layer(layers, x).block_until_ready(), layers[0].nbytes
    )


def _torch(w: jax.Array) -> list[Contestant]:
    try:
        import torch  # pyrefly: ignore[missing-import]
    except ImportError:
        return []
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        layers = [torch.from_numpy(np.array(layer).T.copy()).to(dtype) for layer in w]

        def run(x: jax.Array, layers=layers, dtype=dtype) -> None:
            rows = torch.from_numpy(np.array(x)).to(dtype)
            with torch.inference_mode():
                for layer in layers:
                    torch.nn.functional.linear(rows, layer)

        size = layers[0].element_size() * layers[0].nelement()
        found.append(Contestant(f"PyTorch {str(dtype).removeprefix('torch.')}", run, size))
    return found


if __name__ == "__main__":
    main()
