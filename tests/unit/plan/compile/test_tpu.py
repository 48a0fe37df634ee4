"""With the real TPU compiler: every byte of memory has a name, and what does not fit says so."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fornax.config import environment, from_mapping, load
from fornax.diffusion.config import DiffusionConfig
from fornax.plan.compile import (
    OutOfMemoryError,
    Request,
    compile_programs,
    compile_train,
)
from fornax.plan.compile.diffusion import compile_diffusion
from fornax.plan.compile.parent import _environment
from fornax.plan.recipes import recipes_folder
from fornax.plan.topology import Topology, parse_topology
from fornax.train import TrainConfig

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, is not installed",
    ),
]

_MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}

_BUILDER = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from fornax.mesh import MeshConfig, make_mesh
from fornax.plan.compile import Lowering, array_facts

def build(job):
    mesh = make_mesh(MeshConfig(), job.devices)
    def trace():
        x = jax.ShapeDtypeStruct((job.arguments["rows"], 4096), jnp.bfloat16,
                                 sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16,
                                 sharding=NamedSharding(mesh, PartitionSpec()))
        def f(x, w):
            kept = []
            for _ in range(9):
                x = jnp.sin(x @ w)
                kept.append(x)
            for y in reversed(kept):
                x = jnp.tanh(x @ w) * y
            return x
        lowered = jax.jit(f, donate_argnums=0).lower(x, w)
        facts = array_facts((x, w), lambda _: "other")
        return Lowering(lowered=lowered, mesh=mesh, arguments=facts)
    return {"step": trace}
"""


def test_hosts_share_the_batch_of_a_denoiser() -> None:
    config = load(DiffusionConfig, file=recipes_folder() / "letters.yaml")
    topology = parse_topology("v5p:2x2x2")
    assert topology.num_hosts == 2
    step = compile_diffusion(config, topology)
    (images,) = [array for array in step.arguments if "images" in array.name]
    assert images.shape == (config.batch_size, 16, 16, 1)


def test_a_step_for_a_slice_has_a_name_for_every_argument() -> None:
    config = from_mapping(
        TrainConfig,
        {
            "model": _MODEL,
            "batch_size": 8,
            "seq_len": 128,
            "mesh": {"fsdp": 2, "tensor": 2},
            "dtypes": {"compute": "bfloat16"},
        },
    )
    [step] = compile_train(config, parse_topology("v5e:2x2"), programs=("train_step",))
    named = sum(array.bytes_device for array in step.arguments)
    assert named == pytest.approx(step.memory.arguments, rel=0.02)
    assert step.memory.arguments - named >= 0  # the rest pads small arrays to tiles
    assert step.memory.aliased == pytest.approx(step.memory.outputs, rel=0.01)
    assert 0 < step.memory.temporaries < 64 * 2**20
    assert step.versions["libtpu"]
    assert {device.coords[:2] for device in step.devices} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert "all-gather" in step.hlo or "all-reduce" in step.hlo


def test_what_does_not_fit_gives_figures_and_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_program.py").write_text(_BUILDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    topology = parse_topology("v5e:2x2")

    def request(rows: int) -> Request:
        return Request(builder="large_program:build", arguments={"rows": rows}, programs=("step",))

    with pytest.raises(OutOfMemoryError, match=r"needs 18\.0\d GiB of a device's 15\.75 GiB") as no:
        compile_programs(request(4 * 262_144), topology)
    assert no.value.limit == topology.chip.usable_bytes
    assert no.value.artifact is not None
    memory = no.value.artifact.memory
    assert no.value.used == pytest.approx(memory.total, rel=0.001)
    assert memory.arguments == 2**31 + 2**25
    assert memory.temporaries == pytest.approx(8 * 2**31, rel=0.001)
    assert no.value.artifact.hlo.startswith("HloModule jit_f")

    fits = compile_programs(request(4 * 65_536), topology)[0].memory
    assert fits.arguments == 2**29 + 2**25
    assert fits.aliased == fits.outputs == 2**29
    assert fits.temporaries == pytest.approx(9 * 2**29, rel=0.001)  # the nine that are kept


@pytest.mark.parametrize("name", ["v4:2x2x1", "tpu7x:2x2x1", "2*v5e:2x2", "v5p:2x2x2", "v6e:1x1"])
def test_devices_are_those_that_jobs_see(name: str) -> None:
    topology = parse_topology(name)
    assert _described(topology) == (topology.num_devices, topology.num_hosts)


def _described(topology: Topology) -> tuple[int, int]:
    """How many devices and processes the compiler counts, in a process made for it."""
    source = (
        "import sys\n"
        "from fornax.plan.topology import parse_topology\n"
        "devices = parse_topology(sys.argv[1]).devices()\n"
        "print(len(devices), len({d.process_index for d in devices}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, topology.name],
        env=environment.for_child(_environment(topology)),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    devices, processes = done.stdout.split()
    return int(devices), int(processes)
