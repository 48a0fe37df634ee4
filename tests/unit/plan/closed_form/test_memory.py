"""Estimated memory against what the TPU compiler reported for real train steps.

`compiled.json` keeps, for each step, its configuration, the bytes of its arguments and code, the
FLOPs of its products, and what it needs: arguments, code and the compiler's arena for temporaries
or, where that was not kept, the peak of what is alive in it, which is 1 to 2 % less. (The size that
`memory_analysis` of libtpu 0.0.42 gives for temporaries is another, larger figure.)
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fornax.config import from_mapping
from fornax.mesh import DtypePolicy
from fornax.models import num_parameters
from fornax.plan.cost.estimate import estimate
from fornax.plan.topology import parse_topology
from fornax.quant import QuantConfig
from fornax.train import TrainConfig

pytestmark = pytest.mark.usefixtures("optimized")

COMPILED = json.loads((Path(__file__).parent / "compiled.json").read_text(encoding="utf-8"))


def _estimate(row: dict[str, Any]) -> Any:
    config = from_mapping(TrainConfig, row["config"])
    return estimate(config, parse_topology(row["topology"]))


@pytest.mark.parametrize("name", COMPILED)
def test_total_is_within_ten_percent_of_the_compilers(name: str) -> None:
    """State, gradients, kept activations and temporaries together."""
    row = COMPILED[name]
    found = _estimate(row)
    devices = found.topology.chip.devices
    assert found.memory.total / devices == pytest.approx(row["needs"], rel=0.10)


@pytest.mark.parametrize("name", COMPILED)
def test_arguments_are_the_compilers(name: str) -> None:
    """State and batch are exact but for scalars and the guard's few norms."""
    row = COMPILED[name]
    memory = _estimate(row).memory
    arguments = sum(map(memory.owned, ("parameters", "optimizer", "batch")))
    assert arguments == pytest.approx(row["arguments"], rel=1e-3)


_PRODUCTS = ("attention_projections", "linear_attention", "mlp", "experts", "logits_loss")


@pytest.mark.parametrize("name", COMPILED)
def test_products_are_the_compiled_programs(name: str) -> None:
    """FLOPs of the optimized program's products, loops by their trip counts, within 1 %."""
    row = COMPILED[name]
    found = _estimate(row)
    products = sum(one.flops for one in found.step.work if one.name in _PRODUCTS)
    devices = found.topology.chip.devices
    assert products / devices == pytest.approx(row["product_flops"], rel=0.01)


def test_rounding_weights_takes_memory_and_time() -> None:
    """Of all linear layers, in the parameters' dtype; in another they are rounded into
    the cast."""
    row = COMPILED["small-fsdp-context-dots"]
    config = from_mapping(TrainConfig, row["config"])
    same = dataclasses.replace(config, dtypes=DtypePolicy(params="float32", compute="float32"))
    for each, copies in ((config, 0), (same, 1)):
        rounded = dataclasses.replace(each, quant=QuantConfig(qat="w4a16"))
        was, now = (estimate(x, parse_topology(row["topology"])) for x in (each, rounded))
        assert each.model is not None
        layers = num_parameters(each.model) - 2 * each.model.vocab_size * each.model.hidden_size
        grown = now.memory.total - was.memory.total
        assert grown == pytest.approx(copies * 4 * layers / config.mesh.fsdp, rel=0.1)
        assert now.step.step_seconds > was.step.step_seconds
