"""One of two processes that save and restore together, for `test_two_processes.py`; not a test."""

import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.checkpoint import Checkpointer
from fornax.config import worker_record
from fornax.config.errors import CheckpointError, GroupLostError


def main() -> None:
    root, process, port, task = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    divided = NamedSharding(mesh, PartitionSpec("data"))
    same = NamedSharding(mesh, PartitionSpec())
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=divided),
        "count": jax.ShapeDtypeStruct((), jnp.int32, sharding=same),
    }
    with Checkpointer(root / str(process) if task == "apart" else root) as checkpointer:
        if task == "save":
            save(checkpointer, wanted, process)
        elif task == "full":
            full(checkpointer, wanted, process)
        elif task == "gone":
            lose_the_other(checkpointer, wanted, process, root / "record")
        elif task == "begin":
            fail_to_begin(checkpointer, wanted, process)
        elif task == "restore":
            restored = checkpointer.restore(wanted)
            assert len(restored.data) == 4
            for shard in restored.state["w"].addressable_shards:
                np.testing.assert_array_equal(shard.data, rows(restored.step)[shard.index])
            say(f"restored {restored.step} {sorted(restored.data)}")
        else:
            try:
                checkpointer.restore(wanted)
            except CheckpointError as error:
                say(f"refused {error}")


def rows(step: int) -> np.ndarray:
    return np.arange(8 * 64, dtype=np.float32).reshape(8, 64) + step


def save(
    checkpointer: Checkpointer,
    wanted: dict,
    process: int,
    steps: Sequence[int] = (1, 2, 3, 4, 5),
    begun: Callable[[], object] = lambda: None,
) -> None:
    for step in steps:
        state = {
            "w": jax.make_array_from_callback(
                (8, 64), wanted["w"].sharding, lambda index, step=step: rows(step)[index]
            ),
            "count": jax.make_array_from_callback(
                (), wanted["count"].sharding, lambda _, step=step: np.int32(step)
            ),
        }
        data = {shard: {"at": [step, shard]} for shard in (2 * process, 2 * process + 1)}
        checkpointer.save(step, state=state, data=data, config_yaml="hosts: 2\n")
        begun()
        checkpointer.check()
    checkpointer.wait()
    say(f"saved {checkpointer.latest_step()}")


def full(checkpointer: Checkpointer, wanted: dict, process: int) -> None:
    """Process 1 cannot write another byte; both learn of it at the same call, within seconds."""
    if process == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        save(checkpointer, wanted, process)
    except CheckpointError as error:
        say(f"refused {error}")


def fail_to_begin(checkpointer: Checkpointer, wanted: dict, process: int) -> None:
    """Process 1 may open no file when the second save begins, and may again at the third."""
    save(checkpointer, wanted, process, [1])
    began, most = time.monotonic(), resource.getrlimit(resource.RLIMIT_NOFILE)
    if process == 1:
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(used)]  # no gap below the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, most[1]))
    try:
        save(checkpointer, wanted, process, [2])
    except CheckpointError as error:
        say(f"refused after {time.monotonic() - began:.1f} s: {error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, most)
    save(checkpointer, wanted, process, [3])


def lose_the_other(checkpointer: Checkpointer, wanted: dict, process: int, path: Path) -> None:
    """Process 1 is killed as soon as its save runs in the background; the launcher says so."""
    pids = multihost_utils.process_allgather(np.int32(os.getpid()))
    if process == 0:
        path.parent.mkdir(exist_ok=True)
        worker_record.create(path, rank=0, hosts=2, epoch=1)
        os.environ["FORNAX_WORKER_RECORD"] = str(path)
        threading.Thread(target=tell_once_ended, args=(int(pids[1]), path), daemon=True).start()
    began = time.monotonic()
    try:
        save(checkpointer, wanted, process, [1], begun=lambda: process and os.kill(os.getpid(), 9))
    except GroupLostError:
        say(f"lost after {time.monotonic() - began:.0f} s")
    os._exit(0)  # the background part still waits, as the group was not left


def tell_once_ended(pid: int, path: Path) -> None:
    """As the launcher does: have the worker of a record leave once another has ended."""
    select.select([os.pidfd_open(pid)], [], [])
    worker_record.ask_to_leave(path)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
