"""Checkpoints: how long training is blocked and how fast bytes reach the disk.

Fornax, Orbax alone (its own defaults), torch.distributed.checkpoint, and the disk's own limit (one
file of the same size, written and synced), interleaved in one run on one machine. Restores are
timed twice, with the files in the page cache and after they were dropped from it. Needs torch:

    PARITY_VENV/bin/python benchmarks/checkpoint.py [--megabytes 400] [--rounds 5] [--dir DIR]
"""

import argparse
import datetime
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29561")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from orbax.checkpoint import v1 as ocp

from fornax.checkpoint import CheckpointConfig, Checkpointer

LAYERS = 8


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Parameters and two moments of a stacked transformer of about this size in float32."""
    width = max(64, int((megabytes * 1e6 / 4 / 3 / (LAYERS * 12 + 16)) ** 0.5) // 64 * 64)
    one = {
        "embed": (16 * width, width),
        "q": (LAYERS, width, width),
        "k": (LAYERS, width, width),
        "v": (LAYERS, width, width),
        "o": (LAYERS, width, width),
        "up": (LAYERS, width, 4 * width),
        "down": (LAYERS, 4 * width, width),
        "norm": (LAYERS, width),
    }
    return {f"{part}/{name}": s for part in ("params", "mu", "nu") for name, s in one.items()}


@jax.jit
def _advance(state: Any) -> Any:
    return jax.tree.map(lambda x: x * 0.999 + 0.001, state)


advance = jax.jit(_advance, donate_argnums=0)


class Timed:
    """Seconds of one call, kept by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result


def drop(folder: Path) -> None:
    """Have the kernel forget the pages of the files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def step(state: Any) -> Any:
    state = advance(state)
    return jax.block_until_ready(state)


def fornax_round(timed: Timed, it: Checkpointer, state: Any, number: int) -> Any:
    timed("fornax to disk", lambda: it.save(2 * number, state=state, force=True))
    timed("fornax blocked", lambda: it.save(2 * number + 1, state=state))
    state = timed("fornax next step", lambda: step(state))
    it.wait()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    for verify in ("size", "checksum")[:: 1 if number % 2 else -1]:
        with Checkpointer(it.directory, CheckpointConfig(verify=verify)) as reader:

            def restore(reader: Checkpointer = reader) -> Any:
                return jax.block_until_ready(reader.restore(abstract).state)

            restored = timed(f"fornax restore ({verify})", restore)
            timed("fornax step after", lambda last=restored: step(last))
            del restored
            drop(it.directory)
            timed(f"fornax cold ({verify})", restore)
    for done in it.all_steps():
        shutil.rmtree(it.directory / str(done))
    return state


def orbax_round(timed: Timed, root: Path, state: Any) -> Any:
    timed("orbax to disk", lambda: ocp.save(str(root / "sync"), state))
    response = timed("orbax blocked", lambda: ocp.save_async(str(root / "async"), state))
    state = timed("orbax next step", lambda: step(state))
    response.result()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
    )

    def restore() -> Any:
        return jax.block_until_ready(ocp.load(str(root / "async"), abstract))

    restored = timed("orbax restore", restore)
    timed("orbax step after", lambda last=restored: step(last))
    del restored
    drop(root / "async")
    timed("orbax cold", restore)
    for name in ("sync", "async"):
        shutil.rmtree(root / name)
    return state


def torch_step(state: dict[str, torch.Tensor]) -> None:
    for tensor in state.values():
        tensor.mul_(0.999).add_(0.001)


def torch_round(timed: Timed, root: Path, state: dict[str, torch.Tensor]) -> None:
    def writer(name: str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(root / name)

    timed("torch to disk", lambda: dcp.save(state, storage_writer=writer("sync")))
    future = timed("torch blocked", lambda: dcp.async_save(state, storage_writer=writer("async")))
    timed("torch next step", lambda: torch_step(state))
    future.result()
    timed("torch restore", lambda: dcp.load(state, checkpoint_id=str(root / "async")))
    timed("torch step after", lambda: torch_step(state))
    drop(root / "async")
    timed("torch cold", lambda: dcp.load(state, checkpoint_id=str(root / "async")))
    new = timed(
        "torch new tensors", lambda: {k: torch.empty_like(v).zero_() for k, v in state.items()}
    )
    del new
    for name in ("sync", "async"):
        shutil.rmtree(root / name)


def disk_round(timed: Timed, root: Path, data: bytes) -> None:
    def write() -> None:
        with (root / "raw").open("wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view[: 1 << 24]) :]
            os.fsync(file.fileno())

    timed("disk to disk", write)

    def read() -> None:
        with (root / "raw").open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass

    timed("disk read", read)
    drop(root)
    timed("disk cold", read)
    (root / "raw").unlink()


def measure(megabytes: int, rounds: int, root: Path) -> tuple[Timed, int]:
    timed = Timed()
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes(megabytes).items()
    }
    size = sum(array.nbytes for array in arrays.values())
    raw = rng.bytes(size)
    ours = {name: jnp.array(array) for name, array in arrays.items()}
    theirs = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    del arrays
    ours = step(ours)
    for name in ("fornax", "orbax", "torch", "raw"):
        (root / name).mkdir(parents=True)
    with Checkpointer(root / "fornax", CheckpointConfig(keep_last=2)) as it:
        for number in range(rounds + 1):
            for _ in range(3):
                ours = timed("fornax step", lambda state=ours: step(state))
            ours = fornax_round(timed, it, ours, number)
            for _ in range(3):
                timed("torch step", lambda: torch_step(theirs))
            torch_round(timed, root / "torch", theirs)
            disk_round(timed, root / "raw", raw)
            for _ in range(3):
                ours = timed("orbax step", lambda state=ours: step(state))
            ours = orbax_round(timed, root / "orbax", ours)
    for name, values in timed.seconds.items():
        timed.seconds[name] = values[len(values) // (rounds + 1) :]
    return timed, size


HEADER = """\
| | blocked: in the call | + next step slower | to disk | bytes/s | of the disk | restore | cold |
|---|---|---|---|---|---|---|---|"""


def table(timed: Timed, size: int) -> str:
    middle = {name: statistics.median(values) for name, values in timed.seconds.items()}
    blocked = {
        name: middle[f"{name} blocked"]
        + max(0.0, middle[f"{name} next step"] - middle[f"{name} step"])
        for name in ("fornax", "orbax", "torch")
    }

    def took(name: str) -> str:
        return f"{middle[name] * 1e3:.0f} ms ({size / middle[name] / 1e6:.0f} MB/s)"

    def row(label: str, name: str, restore: str, cold: str) -> str:
        call = middle.get(f"{name} blocked", 0.0)
        extra = blocked.get(name, 0.0) - call
        seconds = middle[f"{name} to disk"]
        return (
            f"| {label} | {call * 1e3:.1f} ms | {extra * 1e3:.1f} ms | {seconds * 1e3:.0f} ms "
            f"| {size / seconds / 1e6:.0f} MB/s | {middle['disk to disk'] / seconds:.2f} "
            f"| {took(restore)} | {took(cold)} |"
        )

    rows = [
        row("Fornax", "fornax", "fornax restore (checksum)", "fornax cold (checksum)"),
        row("Orbax, its defaults", "orbax", "orbax restore", "orbax cold"),
        row("torch.distributed.checkpoint", "torch", "torch restore", "torch cold"),
        row("one file, write and fsync", "disk", "disk read", "disk cold"),
    ]
    verify = middle["fornax restore (checksum)"] - middle["fornax restore (size)"]
    speed = middle["torch to disk"] / middle["fornax to disk"]
    restore = middle["torch restore"] / middle["fornax restore (checksum)"]
    cold = middle["torch cold"] / middle["fornax cold (checksum)"]
    after = ", ".join(
        f"{label} {(middle[f'{name} step after'] - middle[f'{name} step']) * 1e3:.0f} ms"
        for label, name in (("Fornax", "fornax"), ("Orbax", "orbax"), ("torch", "torch"))
    )
    return "\n".join(
        [
            HEADER,
            *rows,
            "",
            f"Blocked in all, torch over Fornax: {blocked['torch'] / blocked['fornax']:.2f} "
            f"(in the call alone: {middle['torch blocked'] / middle['fornax blocked']:.2f}). Time "
            f"to disk, torch over Fornax: {speed:.2f}; Fornax's includes checksums of all files. "
            f"Restore, torch over Fornax: {restore:.2f} from the page cache, {cold:.2f} from the "
            f"disk; the first step after one takes longer by: {after}. "
            f"Verifying them adds {verify * 1e3:.0f} ms to a restore of "
            f"{middle['fornax restore (size)'] * 1e3:.0f} ms from the page cache. Torch restores "
            "into tensors that are there; making them takes it "
            f"{middle['torch new tensors'] * 1e3:.0f} ms more in a new process. "
            f"Tunables of glibc: {os.environ.get('GLIBC_TUNABLES', 'none')}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write checkpoints")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    dist.init_process_group("gloo", rank=0, world_size=1)
    root = Path(tempfile.mkdtemp(prefix="fornax-benchmark-", dir=args.dir))
    try:
        timed, size = measure(args.megabytes, args.rounds, root)
    finally:
        shutil.rmtree(root)
        dist.destroy_process_group()
    head = (
        f"# Checkpoints: {size / 1e6:.0f} MB of parameters and optimizer state\n\n"
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, jax {jax.__version__}, torch {torch.__version__}. "
        f"Medians of {args.rounds} interleaved rounds.\n\n"
    )
    text = head + table(timed, size) + "\n"
    print(text)
    device = jax.devices()[0].platform
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{datetime.date.today()}-{device}-checkpoint.md").write_text(text)


if __name__ == "__main__":
    main()
