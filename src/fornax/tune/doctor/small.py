"""A small run of the same kind: the run's config over the first records of its data."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

from fornax.mesh import make_mesh
from fornax.tune.config import TuneConfig
from fornax.tune.configs.distill import DistillConfig, TopLogits
from fornax.tune.data import Problems, read_lines
from fornax.tune.rl.config import RLConfig
from fornax.tune.rl.parts import rollout_engine

__all__ = ["data_shards", "head", "small_config"]

_COMPLETIONS = 16
_RECORDS = 32


def head(config: TuneConfig, file: Path, count: int) -> Path:
    """Write the first `count` records of the run's data to `file`, under their own names."""
    lines = itertools.islice(read_lines(config.data, Problems()), count)
    text = "".join(json.dumps(line.fields, ensure_ascii=False) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
    return file


def data_shards(config: TuneConfig) -> int:
    """Devices that rows are divided over."""
    mesh, rules = make_mesh(config.mesh), config.mesh.resolved_rules()
    return math.prod(mesh.shape[axis] for axis in rules["batch"])


def small_config(config: TuneConfig, folder: Path) -> TuneConfig:
    """The run's config with a batch of four rows a device, over few records, in `folder`."""
    changes: dict[str, Any] = {
        "eval_data": None,
        "eval_share": 0.0,
        "eval": dataclasses.replace(config.eval, every=None),
        "accumulate": 1,
        "virtual_shards": None,
        "epochs": None,
        "steps": config.steps or 1,
        "doctor": False,
    }
    shards = data_shards(config)
    if isinstance(config, RLConfig):
        return dataclasses.replace(config, **changes, **_of_rollouts(config, folder))
    if isinstance(config, DistillConfig):
        changes["on_policy"] = None
        changes["packing"] = "best_fit" if config.packs else "none"
        if isinstance(config.logits, TopLogits):
            if config.teacher is None:  # its logits on disk are of all the data
                return dataclasses.replace(config, **changes, batch_size=4 * shards)
            changes["logits"] = dataclasses.replace(config.logits, path="")
            changes["packing"] = None
    data = head(config, folder / "records.jsonl", max(_RECORDS, 8 * shards))
    return dataclasses.replace(config, **changes, data=str(data), batch_size=4 * shards)


def _of_rollouts(config: RLConfig, folder: Path) -> dict[str, Any]:
    """Few prompts, each with a whole group; two mini-batches where the run has several."""
    groups = min(max(_COMPLETIONS // config.group_size, 2), max(config.prompts, 2))
    groups += groups % 2
    mini_batches = min(config.mini_batches, 2)
    data = head(config, folder / "records.jsonl", max(_RECORDS, groups))
    engine, _ = rollout_engine(config)  # the run's own, so that its programs serve both
    return {
        "data": str(data),
        "group_size": config.group_size,
        "batch_size": groups * config.group_size // mini_batches,
        "mini_batches": mini_batches,
        "rollout_epochs": min(config.rollout_epochs, 3),
        "asynchronous": None,
        "shuffle": False,
        "rollout": dataclasses.replace(config.rollout, max_num_seqs=engine.max_num_seqs),
    }
