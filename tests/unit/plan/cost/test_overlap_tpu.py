"""By the TPU compiler, at real sizes: what runs beside products, and what that saves."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest

from fornax.config import load
from fornax.config.environment import for_child, tpu_compiler
from fornax.mesh import MeshConfig
from fornax.plan.facts import ProgramReport
from fornax.plan.recipes import recipes_folder
from fornax.plan.topology import parse_topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig
from fornax.train.compiler_options import TPU_OPTIONS

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (the extra tpu) is not installed"
)


@pytest.mark.tpu
@pytest.mark.exhaustive
@needs_libtpu
def test_a_divided_residual_stream_hides_exchange_and_takes_less_memory() -> None:
    recipe = load(TrainConfig, file=recipes_folder() / "llama3-8b.yaml")

    def compiled(**rules: tuple[str, ...]) -> ProgramReport:
        mesh = MeshConfig(tensor=4, fsdp=-1, rules=rules)
        config = dataclasses.replace(recipe, mesh=mesh, batch_size=128)
        return plan_train(config, parse_topology("v5p:4x4x4"), programs=("train_step",)).main

    whole, divided = compiled(activation_embed=()), compiled()
    assert divided.exposed_seconds < whole.exposed_seconds
    assert divided.step_seconds < 0.95 * whole.step_seconds
    assert divided.memory.total < 0.75 * whole.memory.total


_OPTIONS = """
import json
from jax.experimental import topologies
from fornax.mesh import MeshConfig, make_mesh
from fornax.train.compiler_options import step_options

devices = topologies.get_topology_desc(topology_name="v6e:2x2", platform="tpu").devices
found = [step_options(make_mesh(MeshConfig(fsdp=n), devices[:n])) for n in (1, 4)]
print(json.dumps(found))
"""


@pytest.mark.tpu
@needs_libtpu
def test_what_the_environment_says_of_an_option_stays() -> None:
    name = "xla_tpu_overlap_compute_collective_tc"

    def options(**environment: str) -> list[dict[str, bool]]:
        done = subprocess.run(
            [sys.executable, "-c", _OPTIONS],
            env={**for_child(tpu_compiler("v6e-4")), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    alone, several = options()
    assert alone == {}
    assert several[name]
    _, fewer = options(LIBTPU_INIT_ARGS=f"--{name}=false")
    assert fewer == {other: value for other, value in several.items() if other != name}


@pytest.mark.tpu
@pytest.mark.exhaustive
@needs_libtpu
def test_gatherings_of_weights_run_beside_products(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(TrainConfig, file=recipes_folder() / "llama3-8b.v6e-8x8.yaml")

    def compiled() -> ProgramReport:
        return plan_train(recipe, parse_topology("v6e:8x8"), programs=("train_step",)).main

    beside = compiled()
    off = " ".join(f"--{name}=false" for name in TPU_OPTIONS)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", off)
    by_default = compiled()
    assert beside.exposed_seconds < 0.7 * by_default.exposed_seconds
    assert beside.step_seconds < 0.95 * by_default.step_seconds
