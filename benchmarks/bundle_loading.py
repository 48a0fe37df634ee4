"""Load a bundle's weights: bytes per second beside the disk's limit and beside safetensors.

    python benchmarks/bundle_loading.py
    python benchmarks/bundle_loading.py --mebibytes 128 --rounds 2 --no-write

The same float32 weights lie in a bundle and in a safetensors file. What is timed ends with every
array on the device. Reading alone, in one pass over a bundle's weight files with one buffer, is the
limit. Cold: the kernel is told to forget the files first; warm: they lie in its memory. Contestants
take turns in one process.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

import _harness
from fornax import export

CHUNK = 8 << 20
WIDTH = 1024
LIMIT = "reading alone"


def make(folder: Path, mebibytes: int) -> tuple[Path, Path]:
    """Write the same weights as a bundle and as a safetensors file; return both paths."""
    rng = np.random.default_rng(0)
    layers = max(1, (mebibytes << 20) // (4 * WIDTH * WIDTH))
    params = {
        f"layers/{n}/kernel": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / WIDTH**0.5
        for n in range(layers)
    }

    def chain(params, *, x):
        for n in range(layers):
            x = x @ params[f"layers/{n}/kernel"]
        return {"y": x}

    export.save(
        folder / "bundle",
        {"chain": chain},
        params,
        inputs={"chain": {"x": export.Spec(("b", WIDTH), "float32")}},
        buckets={"b": [1]},
        platforms=("cpu",),
        check=False,
    )
    save_file(params, folder / "weights.safetensors")
    os.sync()
    return folder / "bundle", folder / "weights.safetensors"


def read(paths: list[Path], digest: bool = False) -> None:
    """Read files through, into one buffer; SHA-256 of them too."""
    buffer = bytearray(CHUNK)
    for path in paths:
        found = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                if digest:
                    found.update(memoryview(buffer)[:size])


def forget(paths: list[Path]) -> None:
    """Ask the kernel to drop what it holds of the files."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_bundle(path: Path, verify: bool) -> list[jax.Array]:
    """Return the bundle's weights, on the device."""
    bundle = export.open_bundle(path, verify="as-read" if verify else False)
    return list(bundle.load_weights().params.values())


def load_safetensors(path: Path, digest: bool) -> list[jax.Array]:
    """Return the file's tensors, on the device, with its SHA-256 taken first."""
    if digest:
        read([path], digest=True)
    return [jax.device_put(array) for array in load_file(path).values()]


def contestants(bundle: Path, tensors: Path) -> dict[str, tuple[list[Path], Callable[[], object]]]:
    """Return, for each, the files it reads and what it does with them."""
    parts = [path for path in (bundle / "weights").rglob("*") if path.is_file()]
    every = [path for path in bundle.rglob("*") if path.is_file()]
    return {
        LIMIT: (parts, lambda: read(parts)),
        "reading and SHA-256, one thread": (parts, lambda: read(parts, digest=True)),
        "Fornax bundle, verified": (every, lambda: load_bundle(bundle, verify=True)),
        "Fornax bundle, not verified": (every, lambda: load_bundle(bundle, verify=False)),
        "safetensors, verified": ([tensors], lambda: load_safetensors(tensors, digest=True)),
        "safetensors, not verified": ([tensors], lambda: load_safetensors(tensors, digest=False)),
    }


def measure(paths: list[Path], work: Callable[[], object], *, cold: bool) -> float:
    """Return the seconds that `work` takes until its arrays are there."""
    if cold:
        forget(paths)
    start = time.perf_counter()
    done = work()
    jax.block_until_ready(done)
    return time.perf_counter() - start


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        everyone = contestants(*make(Path(folder), args.mebibytes))
        size = sum(path.stat().st_size for path in everyone[LIMIT][0])
        seconds: dict[tuple[str, bool], list[float]] = {}
        for number in range(args.rounds):
            names = list(everyone)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for cold in (True, False):
                    taken = measure(*everyone[name], cold=cold)
                    seconds.setdefault((name, cold), []).append(taken)
    rows = [(name, *_cells(seconds, name, size)) for name in everyone]
    header = ("what", "cold, s", "cold, GB/s", "of the limit", "warm, s", "warm, GB/s")
    text = (
        f"# Loading a bundle's weights\n\n{_harness.machine()}; "
        f"{_harness.versions('fornax-ai', 'jax', 'tensorstore', 'safetensors')}\n\n"
        f"{size / 2**20:.0f} MiB of float32 weights in {size // (4 * WIDTH * WIDTH)} arrays, "
        f"{args.rounds} rounds in turn, medians; shares are medians of ratios within a round. "
        "`of the limit`: the rate over that of reading alone, one pass, one buffer.\n\n"
        + _harness.table((*header, "of the limit"), rows)
    )
    print(text)
    if not args.no_write:
        print(_harness.write_results("bundle_loading", text))


def _cells(seconds: dict[tuple[str, bool], list[float]], name: str, size: int) -> list[str]:
    cells = []
    for cold in (True, False):
        mine, limit = seconds[name, cold], seconds[LIMIT, cold]
        median = statistics.median(mine)
        share = statistics.median(b / a for a, b in zip(mine, limit, strict=True))
        cells += [f"{median:.3f}", f"{size / median / 1e9:.2f}", f"{share:.0%}"]
    return cells


if __name__ == "__main__":
    main()
