"""A cache folder of its own for each test, in which this machine's CPU is measured already, and a
builder of small programs that a child can import."""

import json
from pathlib import Path

import pytest

from fornax.mesh.hardware import cpu

_BUILDER = """
import os, signal, time
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from fornax.config.errors import ShardingError
from fornax.mesh import MeshConfig, make_mesh
from fornax.plan.compile import Lowering, array_facts

def build(job):
    what = job.arguments.get("what", "")
    if what == "sleep":
        with open(job.arguments["pid"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "shard":
        raise ShardingError("embed: dimension 0 of size 3 does not divide")
    if what == "bug":
        raise ValueError("two\\nlines")
    mesh = make_mesh(MeshConfig(), job.devices)
    def program(power):
        def trace():
            sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
            x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
            unread = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
            lowered = jax.jit(lambda x, unread: (x**power).sum()).lower(x, unread)
            facts = array_facts({"x": x, "y": unread}, lambda name: "batch")
            return Lowering(lowered=lowered, mesh=mesh, arguments=facts, notes=("toy",))
        return trace
    print("libraries print what they like")
    return {"square": program(2), "cube": program(3)}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache."""
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path / "cache"))
    plans = tmp_path / "cache" / "plans"
    plans.mkdir(parents=True)
    told = {"flops": {"float32": 1e11, "bfloat16": 1e11}, "bandwidth": 1e10}
    (plans / "cpu.json").write_text(json.dumps({**told, "key": cpu._key()}))
    return plans


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a builder."""
    (tmp_path / "toy_programs.py").write_text(_BUILDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toy_programs:build"
