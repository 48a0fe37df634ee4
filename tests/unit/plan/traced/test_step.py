"""A traced step of a decoder beside the closed forms of decoders, which share no code with it."""

import dataclasses
from pathlib import Path

import pytest

from fornax.config import ConfigError, load
from fornax.plan.cost.estimate import estimate
from fornax.plan.recipes import recipes_folder
from fornax.plan.topology import parse_topology
from fornax.plan.traced import train_facts
from fornax.plan.train import fitted
from fornax.train import TrainConfig, pretrain_task
from fornax.train.task import Hosts
from fornax.train.tasks.pretrain import row_shapes

TOPOLOGY = parse_topology("v5p:2x2x1")


def recipe() -> TrainConfig:
    config = load(TrainConfig, file=Path(recipes_folder() / "qwen3-0.6b.yaml"))
    return fitted(dataclasses.replace(config, batch_size=32), TOPOLOGY)


def traced(config):
    task = pretrain_task(config, read_data=False)
    return train_facts(config, task, row_shapes(config, Hosts()), TOPOLOGY)


@pytest.mark.slow
def test_work_state_and_exchanges_of_a_decoder_are_those_of_closed_forms():
    config = recipe()
    found, closed = traced(config), estimate(config, TOPOLOGY)
    products = {"attention_projections", "mlp", "logits_loss"}
    # Rotations are products with a matrix of a head, a hundredth of these, and no work there.
    flops = sum(w.flops * w.count for w in found.facts.work if w.kind == "products")
    assert flops == pytest.approx(
        sum(row.flops for row in closed.step.work if row.name in products), rel=0.015
    )
    for owner in ("parameters", "optimizer"):
        assert found.facts.memory.owned(owner) == closed.memory.owned(owner)
    # Compilers fuse more than a trace shows: within a third of what the closed form counts.
    assert closed.memory.total == pytest.approx(found.facts.memory.total, rel=0.33)
    moved = {
        kind: sum(e.bytes * e.count for e in found.facts.exchanges if e.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    for kind, size in moved.items():
        expected = sum(c.moved for c in closed.step.collectives if c.kind == kind)
        assert size == pytest.approx(expected, rel=0.25)


def test_a_mesh_axis_whose_exchanges_are_not_known_is_refused():
    config = recipe()
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tensor=2, fsdp=-1))
    with pytest.raises(ConfigError, match=r"mesh\.tensor=2"):
        traced(config)
