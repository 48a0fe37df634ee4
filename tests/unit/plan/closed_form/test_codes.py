"""Products in 8 bits: the same work at another rate, codes through memory and over links."""

import dataclasses

from fornax.mesh import DtypePolicy, MeshConfig
from fornax.models import DecoderConfig
from fornax.plan.closed_form import step_facts
from fornax.plan.cost.estimate import estimate
from fornax.plan.topology import parse_topology
from fornax.quant import QuantConfig
from fornax.train import TrainConfig

LAYERS, WIDE = 3, 2048
MODEL = DecoderConfig(
    vocab_size=4096, hidden_size=WIDE, intermediate_size=4 * WIDE, num_layers=LAYERS, num_heads=16
)
CONFIG = TrainConfig(
    model=MODEL,
    seq_len=2048,
    batch_size=64,
    steps=1,
    remat="full",
    mesh=MeshConfig(fsdp=-1),
    dtypes=DtypePolicy(compute="bfloat16"),
)
CODES = dataclasses.replace(CONFIG, quant=QuantConfig(scheme="fp8"))
SLICE = parse_topology("tpu7x:2x2x2")


def test_products_are_those_of_floats_and_codes_pass_through_memory() -> None:
    floats, codes = (step_facts(config, SLICE).work for config in (CONFIG, CODES))
    kinds = ("mlp", "attention_projections")
    for kind in kinds:
        before, after = (
            sorted((x.flops, x.sides, x.count) for x in work if x.kind == kind)
            for work in (floats, codes)
        )
        assert before == after
    assert {x.dtype for x in codes if x.kind in kinds} == {"float8"}
    assert {x.dtype for x in codes if x.kind == "attention"} == {None}
    rounded = sum(x.bytes * x.count for x in codes if x.kind == "rounding")
    tokens = CONFIG.batch_size * CONFIG.seq_len / SLICE.num_devices
    # A value is read twice in 2 bytes and written in 1: what the seven products of a layer take in,
    # and all but `down` again, and gradients, for two products each. Weights are in 4 bytes.
    inputs, outputs = 4 * WIDE + 2 * WIDE + 4 * WIDE, 4 * WIDE + 2 * 4 * WIDE + WIDE
    weights, down = 4 * WIDE**2 + 3 * 4 * WIDE**2, 4 * WIDE**2
    values = 5 * tokens * (inputs + (inputs - 4 * WIDE) + 2 * outputs)
    assert rounded == LAYERS * (values + 9 * (weights + weights - down) / SLICE.num_devices)


def test_gathered_weights_are_codes() -> None:
    def gathered(config: TrainConfig) -> dict[str, int]:
        found = step_facts(config, SLICE).exchanges
        return {x.name: x.bytes * x.count for x in found if x.kind == "all-gather"}

    floats, codes = gathered(CONFIG), gathered(CODES)
    assert floats.keys() == codes.keys()
    for name, size in floats.items():
        assert codes[name] == (size // 2 if "layer weights" in name else size)


def test_the_step_is_faster_and_says_what_it_counts() -> None:
    floats, codes = (estimate(config, SLICE).step_seconds for config in (CONFIG, CODES))
    assert 0.5 * floats < codes < 0.95 * floats
    some = dataclasses.replace(CONFIG, quant=QuantConfig(scheme="fp8", exclude=("mlp/down",)))
    found = estimate(some, SLICE)
    assert found.step_seconds == codes
    assert any("quant.exclude is not looked at" in note for note in found.step.notes)
