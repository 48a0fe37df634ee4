"""Contestant: Ray Train's JaxTrainer on CPU, as a careful user would write it, to be disturbed.

The trainer forms no group of jax off TPU and GPU, so the loop does: rank 0 gives a port, all call
`jax.distributed.initialize`. Rank 0 saves params and optimizer every N steps, the loop
restores them. Timeouts are tuned: with Ray's own a worker that is stopped is missed for ten
minutes. Each rank appends a line per step, with its process, to `rank-R.steps`; the parent disturbs
and reads.

Shapes: B rows, T tokens, D width, N query heads, K key-value heads, H head width, V vocabulary.
"""

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

HEARTBEAT_SECONDS = 10
"""Without a sign of life of a process, before jax's service ends the others."""
HEALTH_SECONDS = 30
"""Without an answer of a worker, before Ray Train ends the group; its own limit is 600."""
START_SECONDS = 30
"""Until a group with fewer workers is tried, where nodes are gone; its own limit is 60."""


def decoder(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The functions `params()` and `loss(params, tokens_BT)` of a pre-norm GQA decoder."""
    import jax
    import jax.numpy as jnp

    model = settings["model"]
    d, f, v = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    n, k, layers = model["num_heads"], model["num_kv_heads"], model["num_layers"]
    h = d // n

    def params() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def weight(*shape: int) -> Any:
            return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

        stack = {
            "q": weight(layers, d, n * h),
            "k": weight(layers, d, k * h),
            "v": weight(layers, d, k * h),
            "o": weight(layers, n * h, d),
            "up": weight(layers, d, 2 * f),
            "down": weight(layers, f, d),
            "norms": jnp.ones((layers, 2, d)),
        }
        return {"embed": weight(v, d), "layers": stack, "norm": jnp.ones(d)}

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def rotate(x_BTNH: Any) -> Any:
        angles = jnp.arange(x_BTNH.shape[1])[:, None] * 1e4 ** (-jnp.arange(0, h, 2) / h)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(x_BTNH, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x_BTD: Any, w: Any) -> tuple[Any, None]:
        b, t, _ = x_BTD.shape
        y = norm(x_BTD, w["norms"][0])
        q = rotate((y @ w["q"]).reshape(b, t, n, h))
        keys = rotate((y @ w["k"]).reshape(b, t, k, h))
        values = (y @ w["v"]).reshape(b, t, k, h)
        mixed = jax.nn.dot_product_attention(q, keys, values, is_causal=True)
        x_BTD = x_BTD + mixed.reshape(b, t, n * h) @ w["o"]
        gate, up = jnp.split(norm(x_BTD, w["norms"][1]) @ w["up"], 2, -1)
        return x_BTD + (jax.nn.silu(gate) * up) @ w["down"], None

    def loss(params: Any, tokens_BT: Any) -> Any:
        import optax

        x_BTD = params["embed"][tokens_BT[:, :-1]]
        x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
        logits = norm(x_BTD, params["norm"]) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()

    return params, loss


def loop(config: dict[str, Any]) -> None:
    """The training loop of one worker."""
    import jax
    import numpy as np
    import optax
    import ray.train.collective
    from jax.sharding import NamedSharding, PartitionSpec

    settings, context = config["settings"], ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    address = ray.train.collective.broadcast_from_rank_zero(address)
    jax.distributed.initialize(
        address, world, rank, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, initialization_timeout=60
    )
    assert jax.device_count() == world, jax.devices()
    mesh = jax.make_mesh((world,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, rows = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("data",)))
    make, loss = decoder(settings)
    optimizer = optax.adamw(3e-4)

    @jax.jit
    def first() -> Any:
        params = make()
        return params, optimizer.init(params)

    def step(state: Any, tokens: Any) -> tuple[Any, Any]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    begun, state = restored(ray.train.get_checkpoint(), jax.eval_shape(first))
    state = first() if state is None else state
    state = jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x)), state
    )
    step = jax.jit(step, donate_argnums=0, out_shardings=(everywhere, everywhere))
    batch, length = settings["batch_size"], settings["seq_len"]
    with (Path(config["folder"]) / f"rank-{rank}.steps").open("a", buffering=1) as steps:
        for number in range(begun, settings["steps"]):
            tokens = np.random.default_rng(number).integers(
                settings["model"]["vocab_size"], size=(batch, length + 1)
            )[rank::world]
            tokens = jax.make_array_from_process_local_data(rows, tokens.astype(np.int32))
            state, value = step(state, tokens)
            value = float(value)
            line = {"pid": os.getpid(), "step": number + 1, "time": time.time(), "world": world}
            steps.write(json.dumps(line) + "\n")
            if (number + 1) % settings["save_every"] == 0:
                save(state, number + 1, value, rank)


def save(state: Any, step: int, loss: float, rank: int) -> None:
    """Report, with a checkpoint of rank 0's."""
    import jax
    import numpy as np
    import ray.train

    if rank:
        ray.train.report({"loss": loss, "step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        leaves = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state)]
        np.savez(Path(folder) / "state.npz", *leaves, step=step)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss, "step": step}, checkpoint=checkpoint)


def restored(checkpoint: Any, like: Any) -> tuple[int, Any]:
    """The steps that a checkpoint has behind it, and its state; of no checkpoint 0 and None."""
    import jax
    import numpy as np

    if checkpoint is None:
        return 0, None
    leaves, structure = jax.tree.flatten(like)
    with checkpoint.as_directory() as folder, np.load(Path(folder) / "state.npz") as found:
        loaded = [found[f"arr_{number}"] for number in range(len(leaves))]
        return int(found["step"]), jax.tree.unflatten(structure, loaded)


def main() -> None:
    """Train until this is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--settings", required=True, type=json.loads)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--least", type=int, required=True)
    parser.add_argument("--address", required=True)
    given = parser.parse_args()
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(HEALTH_SECONDS)
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "1"
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(START_SECONDS)
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    # jax's cache of compiled programs spares a restart the compilation.
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{given.folder}/programs",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    ray.init(address=given.address, log_to_driver=False, runtime_env={"env_vars": variables})
    fixed = given.least == given.hosts
    JaxTrainer(
        loop,
        train_loop_config={"settings": given.settings, "folder": given.folder},
        scaling_config=ScalingConfig(
            num_workers=given.hosts if fixed else (given.least, given.hosts),
            resources_per_worker={"CPU": 1},
        ),
        run_config=RunConfig(
            name="run",
            storage_path=f"{given.folder}/storage",
            failure_config=FailureConfig(max_failures=10),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
