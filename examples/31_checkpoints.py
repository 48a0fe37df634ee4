"""Save while training, stop, resume on another mesh and in another dtype, find damage.

python examples/31_checkpoints.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("NPROC", "16")

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.config.errors import CheckpointError

temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name) / "checkpoints"


def on(shape, *spec):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*spec))


@jax.jit
def train_step(state):
    return jax.tree.map(lambda x: x + 1, state)


state = {"w": jax.device_put(jnp.zeros((256, 256)), on((4, 1), "data")), "step": jnp.int32(0)}
with Checkpointer(root, CheckpointConfig(keep_last=2, keep_every_steps=40)) as checkpointer:
    for step in range(1, 101):
        state = train_step(state)
        checkpointer.check()  # a failure in the background stops the run here
        if step % 20 == 0:
            checkpointer.save(step, state=state, data={0: {"record": 8 * step}})
    checkpointer.wait()
    print("on disk:", checkpointer.all_steps())

    wanted = {
        "w": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=on((1, 4), None, "model")),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=on((1, 4))),
    }
    restored = checkpointer.restore(wanted)
    w = restored.state["w"]
    print(f"step {restored.step}: {w.dtype}, {w.sharding.spec}, data at {restored.data}")

    largest = max((root / "100").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    try:
        checkpointer.restore(wanted)
        raise SystemExit("the damage went unnoticed")
    except CheckpointError as error:
        print("one bit flipped:", error)

temporary.cleanup()
