"""The kept figures of the compiler are still the compiler's: a few steps are compiled again."""

import importlib.util
import json
from pathlib import Path

import pytest

from fornax.config import from_mapping
from fornax.plan.compile import compile_train
from fornax.plan.cost.estimate import estimate
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

COMPILED = json.loads((Path(__file__).parent / "compiled.json").read_text(encoding="utf-8"))


@pytest.mark.tpu
@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (the extra tpu) is not installed"
)
@pytest.mark.parametrize("name", ["llama3-1b-data-fsdp-products"])
def test_a_compiled_step_needs_what_is_estimated(name: str) -> None:
    """Within 10 % of the installed compiler's total."""
    row = COMPILED[name]
    config, topology = from_mapping(TrainConfig, row["config"]), parse_topology(row["topology"])
    (artifact,) = compile_train(config, topology, programs=("train_step",), cache=False)
    memory = estimate(config, topology).memory
    assert memory.total / topology.chip.devices == pytest.approx(artifact.memory.total, rel=0.10)
