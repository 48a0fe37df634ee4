"""A program for launches in tests: ranks that make steps without arrays, and break when told.

Each rank waits at every step for the others, as in a collective, through files in its folder. A
file `RANK.FAULT` there makes that rank break once, or each time; what is done is appended to
`RANK.steps`.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fornax.config import worker_record


def main(words: Sequence[str]) -> int:
    """Make steps from the last that all have saved."""
    folder, steps = Path(words[0]), int(words[1])
    rank, count = (os.environ[f"FORNAX_{n}"] for n in ("PROCESS_ID", "NUM_PROCESSES"))
    record = worker_record.current()
    assert record is not None
    epoch = os.environ["FORNAX_EPOCH"]
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    with (folder / "mtbf").open("a") as file:
        file.write(os.environ["FORNAX_MTBF"] + "\n")
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    last = 0  # the step at which this rank says that it was asked to stop
    while step < steps:
        step += 1
        record.change("wait_for_data", step)
        told(folder, rank)
        record.change("step", step)
        with (folder / f"{rank}.steps").open("a") as file:
            file.write(f"{step}\n")
        if stop:
            last = last or step
        (folder / f"{rank}.at").write_text(f"{epoch} {step} {last}")
        peers = [met(folder / f"{peer}.at", epoch, step) for peer in range(int(count))]
        if rank == "0":
            (folder / "saving").write_text(str(step))
            (folder / "saving").rename(saved)  # whole, also when this is killed
        if any(peers):
            if record.is_asked_to_keep():
                record.set_kept(step)
            return 143
        time.sleep(0.02)
    return 0


def met(path: Path, epoch: str, step: int) -> bool:
    """Wait for a peer, which may be a step further; whether it was asked to stop by this one."""
    while True:
        words = path.read_text().split() if path.exists() else []
        if len(words) == 3 and words[0] == epoch and int(words[1]) >= step:
            return 0 < int(words[2]) <= step
        time.sleep(0.002)


def told(folder: Path, rank: str) -> None:
    """Break as a file says."""
    for file in folder.glob(f"{rank}.fault-*"):
        kind = file.name.partition("-")[2]
        if kind not in ("always", "never"):
            file.unlink()
        match kind:
            case "data" | "never":
                time.sleep(600)
            case "lock":
                ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock
            case "user":
                sys.stderr.write("error: a bad config\n")
                sys.exit(2)
            case "always":
                with (folder / f"{rank}.agents").open("a") as told:
                    told.write(f"{os.getppid()}\n")
                raise RuntimeError("a bad batch")
