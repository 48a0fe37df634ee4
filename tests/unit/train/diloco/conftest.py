"""A decoder of three layers, laid out over some of the eight devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from fornax.config import from_mapping
from fornax.mesh import MeshConfig
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import Programs, prepare

MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 2,
}

Laid = Callable[..., Programs]


@pytest.fixture(scope="session")
def laid() -> Laid:
    def make(devices: Sequence[jax.Device], **mesh: int) -> Programs:
        config = from_mapping(TrainConfig, {"model": MODEL, "batch_size": 8, "seq_len": 16})
        config = type(config)(**{**vars(config), "mesh": MeshConfig(**mesh)})
        task: Any = pretrain_task(config, read_data=False)
        return prepare(config, task, Ledger(), devices)

    return make
