"""Grouped products beside the dense product of as many rows, lax.ragged_dot and PyTorch.

    python benchmarks/grouped_matmul.py [--seconds 2] [--parts products decode] [--write]
    python benchmarks/grouped_matmul.py --without lax.ragged_dot     # which takes most of the time

Products: forward and both gradients with 64 groups of equal and of skewed sizes (shares 1, 1/2,
1/3, ...). "of dense" is the rate beside that of a dense product (`kernels.linear`) of as many rows,
the median of turns that all contestants take one after the other. The gradient of the matrices
writes 64 of them, for which new memory is mapped, where the dense product writes one: "of both" is
the least time of the dense product and of filling as much new memory, beside the contestant's.
Decoding: a few rows each choose groups at random; "of read" is the touched matrices' bytes per
second beside the best plain read of memory. PyTorch multiplies group by group, and is left out
where it is not installed.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import _bandwidth
import _harness
from fornax import kernels

GROUPS = 64
FILL = "fill"
PRODUCTS = ((4096, 512, 1024), (16384, 256, 512), (8192, 1024, 2048))
"""Rows, inputs, outputs."""
DTYPES = ("float32", "bfloat16")
DECODE = ((8, 64), (32, 64), (64, 128), (256, 64), (256, 128))
"""Rows and groups."""
DECODE_WIDTHS = (1024, 768)
RAGGED_ROWS = 4096
"""Beyond, lax.ragged_dot takes minutes on CPU."""

Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of turns for each line")
    parser.add_argument("--parts", nargs="+", default=["products", "decode"])
    parser.add_argument("--without", nargs="+", default=[], help="contestants to leave out")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/…")
    args = parser.parse_args()
    text = ["# Grouped products", "", f"{_harness.machine()}; {_harness.versions('jax', 'torch')}."]
    if "products" in args.parts:
        case = ("rows", "K x N", "dtype", "sizes", "product", "contestant")
        header = (*case, "GFLOP/s", "of dense", "of both")
        lines = [line for case in PRODUCTS for line in measure_products(*case, args)]
        text += ["", f"## {GROUPS} groups", "", _harness.table(header, lines)]
    if "decode" in args.parts:
        header = ("rows", "groups", "touched", "dtype", "contestant", "us", "GB/s", "of read")
        lines = [line for case in DECODE for line in measure_decode(*case, args)]
        widths = "{} x {}".format(*DECODE_WIDTHS)
        text += ["", f"## Decoding, matrices of {widths}", "", _harness.table(header, lines)]
    print("\n".join(text))
    if args.write:
        print(_harness.write_results("grouped_matmul", "\n".join(text)))


def sizes_of(kind: str, rows: int, groups: int) -> np.ndarray:
    """Return sizes with a sum of `rows`: equal, or in proportion to 1, 1/2, 1/3, ..."""
    weights = 1 / np.arange(1, groups + 1) if kind == "skewed" else np.ones(groups)
    ends = np.round(np.cumsum(weights) / weights.sum() * rows).astype(np.int32)
    return np.diff(ends, prepend=0).astype(np.int32)


def measure_products(M: int, K: int, N: int, args: argparse.Namespace) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for dtype in DTYPES:
        rng = np.random.default_rng(0)
        shapes = (M, K), (GROUPS, K, N), (M, N)
        x, w, dy = (jnp.asarray(rng.normal(size=s).astype(np.float32), dtype) for s in shapes)
        for kind in ("equal", "skewed"):
            sizes = sizes_of(kind, M, GROUPS)
            for product in ("y", "dx", "dw"):
                works = _works(product, x, w, dy, sizes, args.without)
                if product == "dw":
                    works[FILL] = jax.jit(lambda like=w: jnp.ones_like(like))
                taken = _take_turns(works, args.seconds)
                filled = taken.pop(FILL)[0] if product == "dw" else 0.0
                both = taken["dense"][0] + filled if filled and "dense" in taken else 0.0
                for name, (best, ratio) in taken.items():
                    rate = 2 * M * K * N / best / 1e9
                    limit = f"{both / best:.0%}" if both and name != "dense" else ""
                    case = (M, f"{K} x {N}", dtype, kind, product)
                    lines.append((*case, name, f"{rate:.0f}", f"{ratio:.0%}", limit))
                    print(*lines[-1], file=sys.stderr, flush=True)
    return lines


def _works(
    product: str,
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    sizes: np.ndarray,
    without: Sequence[str],
) -> dict[str, Work]:
    """Return contestant to its product; the dense one is the first."""
    sizes_E = jnp.asarray(sizes)
    found = {"dense": _compiled(product, kernels.linear, x, w[0], dy)}
    for name in ("native", "blockwise"):

        def grouped(x: jax.Array, w: jax.Array, name: str = name) -> jax.Array:
            return kernels.grouped_matmul(x, w, sizes_E, implementation=name)

        found[name] = _compiled(product, grouped, x, w, dy)
    if x.shape[0] <= RAGGED_ROWS and "lax.ragged_dot" not in without:
        ragged = _compiled(product, lambda x, w: lax.ragged_dot(x, w, sizes_E), x, w, dy)
        found["lax.ragged_dot"] = ragged
    found |= _torch(product, x, w, dy, sizes)
    return {name: work for name, work in found.items() if name not in without}


def _compiled(
    product: str,
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
) -> Work:
    """Return a function that computes one product: y, or one of its gradients alone."""
    if product == "y":
        forward = jax.jit(multiply)
        return lambda: forward(x, w)
    which = 0 if product == "dx" else 1
    gradient = jax.jit(lambda x, w, dy: jax.vjp(multiply, x, w)[1](dy)[which])
    return lambda: gradient(x, w, dy)


def _torch(
    product: str, x: jax.Array, w: jax.Array, dy: jax.Array, sizes: np.ndarray
) -> dict[str, Work]:
    try:
        import torch  # pyrefly: ignore[missing-import]
    except ImportError:
        return {}
    dtype = getattr(torch, str(x.dtype))
    x_t, w_t, dy_t = (torch.from_numpy(np.array(a, np.float32)).to(dtype) for a in (x, w, dy))
    rows = sizes.tolist()

    def loop() -> object:
        with torch.no_grad():
            if product == "dw":
                return torch.stack([a.T @ b for a, b in zip(x_t.split(rows), dy_t.split(rows))])  # noqa: B905
            left, right = (x_t, w_t) if product == "y" else (dy_t, w_t.transpose(1, 2))
            return torch.cat([a @ b for a, b in zip(left.split(rows), right)])  # noqa: B905

    return {"PyTorch, a loop": loop}


def measure_decode(rows: int, groups: int, args: argparse.Namespace) -> list[tuple[object, ...]]:
    """The products of few rows; the matrices that they touch may lie in a cache, if small."""
    K, N = DECODE_WIDTHS
    lines: list[tuple[object, ...]] = []
    for dtype in DTYPES:
        rng = np.random.default_rng(rows)
        chosen = np.bincount(rng.integers(0, groups, rows), minlength=groups).astype(np.int32)
        x = jnp.asarray(rng.normal(size=(rows, K)).astype(np.float32), dtype)
        w = jnp.asarray(rng.standard_normal((groups, K, N), np.float32), dtype)
        works = _works("y", x, w, jnp.zeros((rows, N), dtype), chosen, [*args.without, "dense"])
        best = _take_turns(works, args.seconds)
        size = int((chosen > 0).sum()) * K * N * w.dtype.itemsize
        read = _bandwidth.read_bandwidth(w.nbytes, os.cpu_count() or 1, args.seconds, max)
        for name, (least, _) in best.items():
            rate = size / least
            case = (rows, groups, int((chosen > 0).sum()), dtype, name)
            lines.append((*case, f"{least * 1e6:.0f}", f"{rate / 1e9:.1f}", f"{rate / read:.0%}"))
    return lines


def _take_turns(works: dict[str, Work], seconds: float) -> dict[str, tuple[float, float]]:
    """Return of each the least time, and the median over turns of the first's time beside it."""
    for work in works.values():
        jax.block_until_ready(work())
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + seconds
    while len(times[next(iter(works))]) < 3 or time.perf_counter() < end:
        for name, work in works.items():
            start = time.perf_counter()
            jax.block_until_ready(work())
            times[name].append(time.perf_counter() - start)
    first = times[next(iter(works))]
    return {
        name: (min(taken), statistics.median(a / b for a, b in zip(first, taken, strict=True)))
        for name, taken in times.items()
    }


if __name__ == "__main__":
    main()
