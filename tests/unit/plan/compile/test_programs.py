"""The programs of a run: those that the run itself compiles, with every byte accounted for."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from fornax.config import from_mapping
from fornax.config.errors import ShardingError
from fornax.plan.compile import cache, compile_train
from fornax.plan.topology import parse_topology
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import prepare
from fornax.train.tasks.pretrain import row_shapes

pytestmark = pytest.mark.usefixtures("optimized")

_MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
_CONFIG: dict[str, Any] = {
    "model": _MODEL,
    "batch_size": 8,
    "seq_len": 16,
    "mesh": {"fsdp": 2, "tensor": 2, "data": 2},
    "data": {"source": {"type": "dataset", "path": "nowhere/to/be/found"}},
}


@pytest.fixture
def config() -> TrainConfig:
    return from_mapping(TrainConfig, _CONFIG)


@pytest.mark.exhaustive
def test_the_step_is_the_one_that_a_run_compiles(config: TrainConfig) -> None:
    step, evaluation = compile_train(config, parse_topology("cpu:8"))
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), jax.devices())
    batch = programs.shapes_of(row_shapes(config, programs.hosts))
    for artifact, lowered in (
        (step, programs.lower_step(batch)),
        (evaluation, programs.lower_evaluation(batch)),
    ):
        stats = lowered.compile().memory_analysis()
        memory = artifact.memory
        assert memory.arguments == stats.argument_size_in_bytes
        assert memory.aliased == stats.alias_size_in_bytes
        assert memory.outputs == stats.output_size_in_bytes
        assert memory.temporaries == pytest.approx(stats.temp_size_in_bytes, rel=0.02)
        assert sum(array.bytes_device for array in artifact.arguments) == memory.arguments
    assert set(step.owned()) == {"parameters", "optimizer", "batch", "other"}
    assert set(evaluation.owned()) == {"parameters", "batch"}
    gate = next(a for a in step.arguments if a.name == "params/layers/mlp/gate/kernel")
    assert gate.bytes_device * 4 == 4 * math.prod(gate.shape)
    assert {axis for entry in gate.axes for axis in entry} == {"fsdp", "tensor"}


def test_what_does_not_divide_is_said_as_the_run_would_say_it(config: TrainConfig) -> None:
    odd = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=3))
    with pytest.raises(ShardingError, match="the mesh data=3 x fsdp=2 x tensor=2 needs 12 devices"):
        compile_train(odd, parse_topology("cpu:8"))


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"seed": 5, "save_every": 7, "eval": {"every": 3}, "log": {"every": 9}}, True),
        ({"data": {"source": {"type": "dataset", "path": "elsewhere"}}}, True),
        ({"batch_size": 16}, False),
        ({"remat": "full"}, False),
        ({"steps": 5}, False),  # the learning rate's schedule is part of the step
        ({"data": {"virtual_shards": 16}}, False),  # a note mentions it
    ],
    ids=str,
)
def test_only_what_changes_a_program_makes_another_entry(
    changes: dict[str, Any], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def remember(request: Any, topology: Any, program: str) -> Any:
        asked.append(cache.path_of(request, topology, program))
        return "found"

    monkeypatch.setattr(cache, "find", remember)
    for mapping in (_CONFIG, {**_CONFIG, **changes}):
        run = from_mapping(TrainConfig, mapping)
        compile_train(run, parse_topology("v5e:2x2"), programs=("train_step",))
    assert (asked[0] == asked[1]) is same
