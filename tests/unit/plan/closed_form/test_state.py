"""The plan's state is the trainer's: the same arrays, in the same dtypes, divided the same way."""

import math
from typing import Any

import jax
import pytest

from fornax.config import from_mapping
from fornax.plan.cost.estimate import estimate
from fornax.plan.topology import parse_topology
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import prepare

MODEL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
}


def held(tree: Any) -> int:
    """Bytes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "chain",
    [
        {"optimizer": {"type": "adamw"}},
        {"optimizer": {"type": "adamw", "mu_dtype": "bfloat16"}, "ema": {}},
        {"optimizer": {"type": "muon"}, "accumulate": 2},
        {"optimizer": {"type": "soap"}},
        {"optimizer": {"type": "shampoo", "block_size": 48}},
        {"optimizer": {"type": "optax:adabelief", "b1": 0.8}},
    ],
    ids=str,
)
def test_bytes_are_the_trainers(chain: dict[str, Any], params: str) -> None:
    config = from_mapping(
        TrainConfig,
        {
            "model": MODEL,
            "batch_size": 8,
            "seq_len": 64,
            "dtypes": {"params": params},
            "optim": chain,
            "mesh": {"data": 1, "fsdp": 4, "tensor": 2},
        },
    )
    planned = estimate(config, parse_topology("cpu:8")).memory
    state = prepare(config, pretrain_task(config), Ledger(), jax.devices()).abstract
    assert planned.owned("parameters") == held(state.params)
    assert planned.owned("optimizer") == held(state.optimizer)
