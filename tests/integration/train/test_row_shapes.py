"""What the planner takes for a host's rows is what the data gives."""

from typing import Any

import jax

from fornax.config import from_mapping
from fornax.train import Hosts, TrainConfig, pretrain_task
from fornax.train.tasks.pretrain import row_shapes


def test_shapes_of_rows_are_those_of_the_rows(settings: dict[str, Any]):
    run = from_mapping(TrainConfig, settings)
    for hosts in (Hosts(), Hosts(index=1, count=2), Hosts(index=2, count=3), Hosts(multiple=5)):
        batches = pretrain_task(run).batches("train", hosts)
        rows = next(batches)
        batches.close()
        found = {name: (row.shape, row.dtype) for name, row in rows.items()}
        expected = row_shapes(run, hosts)
        assert found == {name: (shape.shape, shape.dtype) for name, shape in expected.items()}
        assert all(isinstance(shape, jax.ShapeDtypeStruct) for shape in expected.values())
