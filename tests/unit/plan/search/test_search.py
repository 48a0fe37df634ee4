"""The search finds what published runs chose or better, learns from compilation, repeats itself."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fornax.config import from_mapping, to_mapping
from fornax.config.errors import ConfigError
from fornax.config.text import write_flow
from fornax.mesh import MeshConfig
from fornax.plan.cost.estimate import estimate
from fornax.plan.search import Measured, SearchResult, search
from fornax.plan.topology import Topology, parse_topology
from fornax.train import TrainConfig

SMALL = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
}


def _config(**more: Any) -> TrainConfig:
    told = {
        "model": SMALL,
        "batch_size": 32,
        "seq_len": 2048,
        "dtypes": {"compute": "bfloat16"},
        "remat": "full",
    }
    return from_mapping(TrainConfig, {**told, **more})


V5E = parse_topology("v5e:2x4")


def test_the_best_is_no_slower_than_the_given_and_every_plan_runs() -> None:
    """Plans are ordered, fit, divide, and say why."""
    found = search(_config(), V5E)
    assert found.given is not None
    assert found.best
    assert found.best[0].step_seconds <= found.given.step_seconds
    times = [one.step_seconds for one in found.best]
    assert times == sorted(times)
    for one in found.best:
        assert one.total_bytes <= one.estimate.memory.usable
        assert estimate(one.config, V5E).step_seconds == one.step_seconds
        assert "tokens/s per chip" in one.reason
    assert found.considered > sum(found.pruned.values())


@pytest.mark.slow
def test_the_same_search_gives_the_same_plans() -> None:
    """Nothing in it depends on an order that changes."""
    first, second = search(_config(), V5E), search(_config(), V5E)
    assert [one.config for one in first.best] == [one.config for one in second.best]
    assert first.pruned == second.pruned


def test_changed_keys_laid_over_the_given_config_make_the_plan() -> None:
    """The YAML that is printed is the plan."""
    config = _config()
    for one in search(config, V5E).best:
        told = to_mapping(config)
        for key, value in yaml.safe_load(write_flow(dict(one.changes))).items():
            told[key] = {**told[key], **value} if isinstance(value, dict) else value
        assert from_mapping(TrainConfig, told) == one.config


def _compiler(memory: float, time: float) -> tuple[Any, list[TrainConfig]]:
    """A compiler that finds so much more memory and time than was estimated."""
    asked: list[TrainConfig] = []

    def compiled(config: TrainConfig, topology: Topology) -> Measured:
        asked.append(config)
        found = estimate(config, topology)
        size = round(found.memory.total * memory)
        problem = None if size <= found.memory.usable else "out of memory"
        return Measured(total_bytes=size, step_seconds=found.step_seconds * time, problem=problem)

    return compiled, asked


def test_compilation_corrects_and_stays_within_the_budget() -> None:
    """Compiled figures replace estimates, and their ratio corrects the others."""
    compiler, asked = _compiler(memory=1.2, time=1.5)
    found = search(_config(), V5E, budget=2, compile=compiler)
    assert len(asked) == found.compiled == 2
    assert found.given is not None
    assert found.given.total_bytes == pytest.approx(1.2 * found.given.estimate.memory.total)
    assert found.given.step_seconds == pytest.approx(1.5 * found.given.estimate.step_seconds)
    best = found.best[0]
    assert best.measured is not None
    assert best.step_seconds == pytest.approx(1.5 * best.estimate.step_seconds)


def test_a_plan_that_does_not_fit_once_compiled_is_not_offered() -> None:
    """The search goes on to smaller ones."""
    compiler, _ = _compiler(memory=3.0, time=1.0)
    config = _config(batch_size=256, seq_len=4096)
    found = search(config, V5E, budget=4, compile=compiler)
    assert found.failed
    for one in found.best:
        assert one.total_bytes <= one.estimate.memory.usable
    failed = {words for words, _ in found.failed}
    assert len(failed) == len(found.failed)


def test_a_budget_needs_a_compiler() -> None:
    """Rather than silently estimating."""
    with pytest.raises(ConfigError, match="budget=3"):
        search(_config(), V5E, budget=3)


@pytest.mark.exhaustive
def test_where_nothing_fits_the_closest_is_named() -> None:
    """A model far too large for two chips."""
    model = {**SMALL, "hidden_size": 16384, "intermediate_size": 65536, "num_layers": 64}
    found = search(_config(model={**model, "num_heads": 128, "head_dim": 128}), V5E)
    assert found.best == ()
    assert found.closest is not None
    assert found.closest.memory.total > found.closest.memory.usable
    assert found.given_problem is not None
    assert "GiB" in found.given_problem


def test_tensor_parallelism_stays_inside_a_server_and_slices_are_data_parallel() -> None:
    """What crosses the slow network is what the fewest bytes cross."""
    for one in search(_config(), parse_topology("h100:2x8"), keep=50).best:
        assert one.config.mesh.tensor <= 8
    for one in search(_config(), parse_topology("2*v5e:2x4"), keep=50).best:
        assert one.config.mesh.slice == 2


_PUBLISHED = Path(__file__).parents[4] / "benchmarks" / "published" / "maxtext.json"
_ROWS = (
    "8b-v6e-8",
    "8b-v6e-64",
    pytest.param("70b-v6e-64", marks=pytest.mark.exhaustive),
    pytest.param("mistral-7b-v6e-8", marks=pytest.mark.exhaustive),
    pytest.param("32b-v5e-256", marks=pytest.mark.exhaustive),
    pytest.param("128b-v5p-256", marks=pytest.mark.exhaustive),
    pytest.param("70b-tpu7x-64", marks=pytest.mark.exhaustive),
    pytest.param("70b-v6e-256", marks=pytest.mark.exhaustive),
    pytest.param("gemma3-12b-v6e-256", marks=pytest.mark.exhaustive),
    pytest.param("16b-v5e-256", marks=pytest.mark.exhaustive),
)


def _published(name: str) -> tuple[TrainConfig, Topology]:
    """A published run as Fornax would do it."""
    told = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    row = next(row for row in told["rows"] if row["id"] == name)
    topology = parse_topology(row["topology"])
    named = isinstance(row["remat"], dict)
    config = {
        "model": told["models"][row["model"]],
        "batch_size": round(row["batch_per_device"] * topology.num_devices),
        "seq_len": row["seq_len"],
        "remat": "names" if named else row["remat"],
        "remat_save": row["remat"].get("save", []) if named else [],
        "remat_offload": row["remat"].get("offload", []) if named else [],
        "mesh": {**row["mesh"], "rules": row.get("rules", {})},
        "dtypes": {"params": row["params"], "compute": "bfloat16"},
        "optim": {"optimizer": {"type": "adamw", "mu_dtype": row.get("mu_dtype")}},
    }
    return from_mapping(TrainConfig, config), topology


def _search_from_nothing(published: TrainConfig, topology: Topology) -> SearchResult:
    """The same run with mesh and remat forgotten."""
    start = dataclasses.replace(
        published,
        remat="full",
        remat_save=(),
        remat_offload=(),
        mesh=MeshConfig(slice=topology.slices, rules=published.mesh.rules),
    )
    return search(start, topology)


@pytest.mark.slow
@pytest.mark.parametrize("name", _ROWS)
def test_published_plans_are_found_or_bettered(name: str) -> None:
    """By the search's own prediction, at the published batch."""
    config, topology = _published(name)
    published = estimate(config, topology)
    found = _search_from_nothing(config, topology)
    assert found.best
    assert found.best[0].step_seconds <= published.step_seconds * (1 + 1e-9)
