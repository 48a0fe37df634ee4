"""Forks one trainer after another for `test_faults.py`; not a test.

The imports are paid once, in this process, which never touches a device. For each line on its
standard input, the seconds to let it save, it forks a trainer that resumes from the latest step,
checks it, then saves step after step until it is killed; the answer is the step it resumed at.
"""

import os
import select
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp  # noqa: F401

from fornax.checkpoint import CheckpointConfig, Checkpointer

SHAPE = (1024, 1024)


def state_at(step: int) -> dict:
    base = jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE)
    return {"w": base + step, "opt": [jnp.full(SHAPE, float(step)), jnp.int32(step)]}


def resume(checkpointer: Checkpointer) -> int:
    """The latest step, its contents checked; -1 when there is none."""
    if checkpointer.latest_step() is None:
        return -1
    want = state_at(checkpointer.latest_step())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), want)
    restored = checkpointer.restore(abstract)
    jax.tree.map(np.testing.assert_array_equal, restored.state, want)
    assert restored.data == {0: {"position": restored.step}}
    assert restored.config_yaml == f"step: {restored.step}\n"
    return restored.step


def train(root: Path, report: int) -> None:
    with Checkpointer(root, CheckpointConfig(keep_last=2)) as checkpointer:
        step = resume(checkpointer)
        os.write(report, f"{step}\n".encode())
        while True:
            step += 1
            checkpointer.save(
                step,
                state=state_at(step),
                data={0: {"position": step}},
                config_yaml=f"step: {step}\n",
            )
            checkpointer.check()
            time.sleep(0.001)


def one_round(root: Path, seconds: float) -> str:
    """Fork a trainer, kill it that long after it resumed; the step it resumed at, or 'failed'."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            train(root, write)
        except BaseException as error:
            sys.stderr.write(f"trainer failed: {error!r}\n")
        os._exit(1)
    os.close(write)
    ready = select.select([read], [], [], 300)[0]
    answer = os.read(read, 64).decode().strip() if ready else ""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(read)
    killed = os.WIFSIGNALED(status)
    return answer if killed and answer else "failed"


def main() -> None:
    warnings.simplefilter("ignore")
    root = Path(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(one_round(root, float(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
