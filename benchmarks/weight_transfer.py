"""Weights from a trainer to a sampler in another process: bytes per second, beside peers.

Each contestant has float32 arrays on the host (jax's transfer: on CPU devices) and ends a round
when the other process has all of them and answers; checksums included where there are any. Rounds
of all take turns. The limits are one copy of the same arrays within a process, into memory that was
used before, and the same bytes over loopback TCP between threads, from and into such memory.

    python benchmarks/weight_transfer.py [--megabytes 256] [--arrays 32] [--rounds 5]
"""

import argparse
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

from _harness import machine, table, versions, write_results
from fornax.config.credentials import Credentials
from fornax.config.worker_process import WorkerProcess, receive, send
from fornax.tune.rollout import (
    Completion,
    RemoteSampler,
    SamplerServer,
    SamplerStats,
    SampleSettings,
)

PLAIN = Credentials.make()
SETTINGS = SampleSettings(max_tokens=1)


class Taker:
    """Takes weights and draws one token, without an engine."""

    def update(self, params: Any, version: int) -> None:
        self.last = float(params["layer"][0][0])

    def sample_part(
        self, prompts: Any, settings: Any, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        one = Completion(
            tokens=np.array([int(self.last)], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            mask=np.ones(1, np.int8),
            finish_reason="length",
            text="",
            seed=seeds[0],
        )
        return [[one]]

    def interrupt(self) -> None:
        """Nothing takes long."""

    def stats(self) -> SamplerStats:
        return SamplerStats()

    def close(self) -> None:
        """Nothing is held."""


def sampler_process(parent: Connection) -> None:
    """A sampler on an inherited socket."""
    descriptor, share, shown = receive(parent)
    listener = socket.socket(fileno=descriptor)
    SamplerServer(listener, Credentials(**shown), share=share).run(Taker())


def pulling_process(parent: Connection) -> None:
    """Pulls arrays by jax's transfer when it is told to."""
    server = _transfer_server()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    address, count, size = receive(parent)
    connection = server.connect(address)
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32, sharding=device)] * count
    while True:
        found = jax.block_until_ready(connection.pull(receive(parent), shapes))
        send(parent, float(found[0][0]))


def _transfer_server() -> Any:
    client = jax.devices()[0].client
    return transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])


Round = Callable[[int], float]
"""(number of the round) to what the other process found in the first array."""


def by_samplers(arrays: Sequence[np.ndarray], *, share: bool, run: Credentials = PLAIN) -> Round:
    """Fornax: memory that both map, or TCP as between machines, with TLS or not; CRC-32 always."""
    listener = socket.create_server(("127.0.0.1", 0))
    process = WorkerProcess("weight_transfer:sampler_process", inherit=[listener.fileno()])
    process.send([listener.fileno(), share, run.fields()])
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    sampler = RemoteSampler([address], run, shards=1, max_model_len=1, versions=1)

    def send_round(number: int, held: object = process) -> float:
        weights = {("layer", place): array for place, array in enumerate(arrays)}
        sampler.update(weights, number)
        return float(sampler.sample([[1]], SETTINGS, [number])[0][0].tokens[0])

    return send_round


def by_ray(arrays: Sequence[np.ndarray]) -> Round:
    """Ray's object store: put here, got by an actor."""
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

    class Actor:
        def take(self, given: list[np.ndarray]) -> float:
            return float(given[0][0])

    actor: Any = ray.remote(Actor).options(num_cpus=1).remote()

    def run(number: int) -> float:
        return ray.get(actor.take.remote(ray.put(list(arrays))))

    return run


def by_jax(arrays: Sequence[np.ndarray]) -> Round:
    """jax.experimental.transfer, pulled by the other process."""
    server = _transfer_server()
    process = WorkerProcess("weight_transfer:pulling_process")
    process.send([server.address(), len(arrays), arrays[0].size])

    def run(number: int) -> float:
        server.await_pull(number, [jnp.array(array) for array in arrays])
        return process.ask(number, 120)

    return run


def by_copy(arrays: Sequence[np.ndarray]) -> Round:
    """One copy within the process, into memory that was used before."""
    there = [np.zeros_like(array) for array in arrays]

    def run(number: int) -> float:
        for array, place in zip(arrays, there, strict=True):
            np.copyto(place, array)
        return float(there[0][0])

    return run


def by_loopback(arrays: Sequence[np.ndarray]) -> Round:
    """TCP alone, by two threads of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    source = socket.create_connection(listener.getsockname())
    target, _ = listener.accept()
    there = [np.zeros_like(array) for array in arrays]

    def run(number: int, held: object = listener) -> float:
        sending = threading.Thread(target=lambda: [source.sendall(array.data) for array in arrays])
        sending.start()
        for place in there:
            view, have = place.view(np.uint8).data, 0
            while have < len(view):
                have += target.recv_into(view[have:])
        sending.join()
        return float(there[0][0])

    return run


def main() -> None:
    """Run all, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--arrays", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = options.megabytes * 2**20 // 4 // options.arrays
    arrays = [np.full(size, 1.0, np.float32) for _ in range(options.arrays)]
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    made = {
        "Fornax, one machine": by_samplers(arrays, share=True),
        "Fornax, TCP": by_samplers(arrays, share=False),
        "Fornax, TCP with TLS": by_samplers(arrays, share=False, run=Credentials.make(tls=True)),
        "Ray's object store": by_ray(arrays),
        "jax.experimental.transfer": by_jax(arrays),
        "limit: a copy within the process": by_copy(arrays),
        "limit: loopback TCP": by_loopback(arrays),
    }
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(options.rounds + 2):  # two to warm up: memory is new to the system then
        for array in arrays:
            array[0] = number
        for name, run in made.items():
            began = time.perf_counter()
            found = run(number)
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
            if found != number:
                raise SystemExit(f"{name}: {found} came instead of {number}")
    whole = options.megabytes * 2**20
    rows = [
        [name, f"{whole / statistics.median(took) / 1e6:,.0f}", f"{whole / min(took) / 1e6:,.0f}"]
        for name, took in seconds.items()
    ]
    text = (
        f"# Weights to a sampler in another process\n\n{machine()}. {versions('jax', 'ray')}.\n\n"
        f"{options.arrays} float32 arrays, {options.megabytes} MiB together; {options.rounds} "
        "rounds in turns. Wall time: what else ran on the machine is in it.\n\n"
        + table(["MB/s", "median", "best"], rows)
        + "\n\nFornax within one machine and Ray's store are memory that both processes map. "
        "Fornax copies once and reads all twice for its checksum, which Ray has not. Over TCP it "
        "makes the same copy first, once for all samplers. With `--private-network` TLS is added."
    )
    print(text)
    print(write_results("weight_transfer", text))


if __name__ == "__main__":
    main()
