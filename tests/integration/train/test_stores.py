"""A run whose data and checkpoints are in an object store, killed and resumed elsewhere."""

import contextlib
import json
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fornax.checkpoint.mirror import Mirror

pytestmark = [pytest.mark.fault, pytest.mark.slow]

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "accuracy", "skipped", "eval/loss")


@contextlib.contextmanager
def moto() -> Iterator[dict[str, str]]:
    """Amazon's S3 as moto plays it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()


@contextlib.contextmanager
def gcs() -> Iterator[dict[str, str]]:
    """Google Cloud Storage as gcp-storage-emulator plays it."""
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    try:
        yield {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    finally:
        server.stop()


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.exhaustive)])
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, dataset: Path
) -> Iterator[tuple[Any, str, dict[str, str]]]:
    """A store with a bucket and the dataset in it: its file system, its protocol, its variables."""
    with {"s3": moto, "gs": gcs}[request.param]() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem(request.param, skip_instance_cache=True)
        files.mkdir("bucket")
        files.put(str(dataset), "bucket/dataset", recursive=True)
        yield files, request.param, variables


def exact(run_dir: Path) -> list[tuple]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line).get(name) for name in EXACT) for line in lines]


@pytest.mark.exhaustive
def test_a_run_killed_on_one_machine_goes_on_on_another(
    start: Any,
    store: tuple[Any, str, dict[str, str]],
    uninterrupted: list[dict[str, Any]],
    tmp_path: Path,
):
    """`kill -9` at random moments, copying among them; nothing of the first machines is left."""
    files, protocol, variables = store
    changes = {
        "data": {"source": {"type": "dataset", "path": f"{protocol}://bucket/dataset"}},
        "checkpoint": {"mirror": f"{protocol}://bucket/run", "keep_last": 2},
        "save_every": 2,
    }
    rng, whole = random.Random(protocol), [tuple(r.get(n) for n in EXACT) for r in uninterrupted]
    mirror = Mirror(f"{protocol}://bucket/run", tmp_path / "machine3/checkpoints")
    for machine in range(3):
        run_dir = tmp_path / f"machine{machine}"
        process = start(run_dir, env=variables, **changes)
        copied = machine == 2  # some machine must have sent a whole copy
        kill_after(
            *(process, run_dir, rng.randint(3, 6), rng.uniform(0, 0.3)),
            and_when=lambda copied=copied: not copied or mirror.latest_step() is not None,
        )
        shutil.rmtree(run_dir)
    there = mirror.latest_step()
    process = start(tmp_path / "machine3", env=variables, **changes)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert there is not None
    assert exact(tmp_path / "machine3") == whole[there:]
    steps = {name.split("/")[2].split("-")[0] for name in files.find("bucket/run")}
    assert steps == {"18", "20"}


def kill_after(
    process: Any, run_dir: Path, lines: int, delay: float, and_when: Callable[[], bool]
) -> None:
    """Kill once so many steps are recorded, something else is so and a moment passed."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines and and_when():
            time.sleep(delay)
            break
        time.sleep(0.002)
    process.kill()
    process.communicate()
