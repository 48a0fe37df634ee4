"""The engines that rollouts are drawn by: their devices, types and sizes, from the trainer's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from tests.unit.tune.tiny import COLOURS, save_model

from fornax.config.errors import ConfigError
from fornax.mesh import DtypePolicy, MeshConfig
from fornax.tune.config import GRPOConfig, RolloutConfig
from fornax.tune.rl.components import rollout_engine
from fornax.tune.run import tune

CONFIG = GRPOConfig(
    model="m", data="d.jsonl", reward=("python_parses",), batch_size=512, mini_batches=2
)


def engine_of(**changes: Any) -> tuple[Any, list[list[jax.Device]]]:
    return rollout_engine(dataclasses.replace(CONFIG, **changes))


def test_defaults_follow_the_trainer() -> None:
    engine, devices = engine_of(dtypes=DtypePolicy(compute="bfloat16"))
    assert devices == [jax.devices()[:1]]  # virtual devices share the cores of one CPU
    assert (engine.dtype, engine.max_num_seqs, engine.max_num_batched_tokens) == (
        "bfloat16",
        256,
        512,
    )
    assert engine.gpu_memory_utilization == 0.3


def test_sizes_choose_neighbours_on_the_trainers_tensor_axis() -> None:
    rollout = RolloutConfig(
        tensor_parallel_size=2, data_parallel_size=3, dtype="float32", max_num_batched_tokens=900
    )
    mesh = MeshConfig(fsdp=2, tensor=4)
    engine, devices = engine_of(rollout=rollout, mesh=mesh, batch_size=64, mini_batches=1)
    assert [[d.id for d in part] for part in devices] == [[0, 1], [2, 3], [4, 5]]
    assert (engine.tensor_parallel_size, engine.max_num_seqs) == (2, 22)
    assert (engine.dtype, engine.max_num_batched_tokens) == ("float32", 900)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 4, "data_parallel_size": 3}, "more than the trainer's 8"),
        ({"data_parallel_size": 9}, "more than the trainer's 8"),
        ({"tensor_parallel_size": 0}, "must be 1 or more, or null"),
        ({"gpu_memory_utilization": 1.0}, "the trainer needs the rest"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4 is below"),
    ],
)
def test_what_the_devices_cannot_hold_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(rollout=RolloutConfig(**changes))


@pytest.mark.exhaustive
def test_a_run_over_eight_devices_draws_by_engines_over_some_of_them(tmp_path: Path) -> None:
    """Two engines of two devices draw what one on one device does, and mismatch stays rounding."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{c} is"}) + "\n" for c in COLOURS))
    config = GRPOConfig(
        model=str(save_model(tmp_path)),
        data=str(prompts),
        reward=("python_parses",),
        batch_size=16,
        group_size=4,
        steps=2,
        max_length=32,
        rollout=RolloutConfig(max_tokens=8),
        mesh=MeshConfig(fsdp=4, tensor=2),
        doctor=False,
    )
    divided = RolloutConfig(max_tokens=8, tensor_parallel_size=2, data_parallel_size=2)
    drawn = []
    for name, rollout in (("one", config.rollout), ("four", divided)):
        out = tmp_path / name
        tune(dataclasses.replace(config, rollout=rollout), out, progress="none")
        lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
        assert all(abs(line["mismatch_kl"]) < 1e-6 for line in lines)
        samples = [json.loads(x) for x in (out / "samples.jsonl").read_text().splitlines()]
        drawn.append([sample["completion"] for sample in samples[:16]])
    assert drawn[0] == drawn[1]
