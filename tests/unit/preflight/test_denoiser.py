"""Preflights of denoisers: sound configs pass, planted faults are found, small ones keep kinds."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.memory import let_programs_go

from fornax.config import from_mapping, load
from fornax.diffusion import task as diffusion_task
from fornax.diffusion.config import DiffusionConfig
from fornax.preflight import Report, preflight
from fornax.preflight.run import check
from fornax.preflight.shrink_denoiser import shrink_denoiser
from fornax.train import Loss

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = ("letters", "flux-dev", "qwen-image", "sdxl", "wan2.1-14b")
LETTERS: dict[str, Any] = {
    "data": {"type": "letters"},
    "model": {"type": "dit", "num_layers": 6, "num_heads": 4, "head_dim": 32, "text": "cross"},
    "text": {"type": "words", "width": 128, "length": 4},
    "batch_size": 64,
    "accumulate": 2,
    "mesh": {"fsdp": 2, "tensor": 2},
}


@pytest.fixture(autouse=True)
def little_before() -> None:
    """A preflight compiles much: what earlier tests compiled is freed first."""
    let_programs_go(above=600)


def run(*groups: str, **changes: Any) -> Report:
    config = from_mapping(DiffusionConfig, {**LETTERS, **changes})
    return check(config, quick=not groups, only=groups)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.slow
def test_a_sound_run_passes() -> None:
    report = run(dtypes={"params": "bfloat16", "compute": "bfloat16"})
    assert report.ok, report.paragraph()
    assert report.shrunk["shape"] == [8, 8, 1]
    found = {each.group for each in report.checks if each.status == "ok"}
    assert found == {"rules", "data", "mesh", "precision", "checkpoint"}


@pytest.mark.slow
def test_noise_of_the_place_in_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the row's number in what is computed at once, not of its example."""
    original = diffusion_task.example_noise

    def by_row(seed: int, step: Any, ids_B: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return original(seed, step, jnp.arange(len(ids_B)), shape)

    monkeypatch.setattr(diffusion_task, "example_noise", by_row)
    first = run("accumulation").first_failure
    assert first is not None
    assert first.detail.startswith("loss differs")


@pytest.mark.slow
def test_rows_that_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of weighted losses is divided by the number of rows."""
    original = diffusion_task.denoising_loss

    def alike(network: Any, batch: Any, *args: Any, **options: Any) -> Loss:
        loss = original(network, batch, *args, **options)
        return dataclasses.replace(loss, weight=jnp.float32(len(batch["weight"])))

    monkeypatch.setattr(diffusion_task, "denoising_loss", alike)
    first = run("accumulation").first_failure
    assert first is not None
    assert first.detail.startswith("the weights of the batch add up to 8, not ")


def test_an_axis_that_divides_nothing() -> None:
    mesh = {"fsdp": 2, "tensor": 2, "rules": {"kv_heads": ["fsdp"]}}
    first = run("rules", mesh=mesh).first_failure
    assert first is not None
    assert "`mesh.rules.kv_heads` matches no array" in first.detail


@pytest.mark.parametrize("name", NAMES)
def test_kinds_stay(name: str) -> None:
    """A small recipe has every kind of block that the recipe has, in its order."""
    config = load(DiffusionConfig, file=RECIPES / f"{name}.yaml", overrides={})
    small = shrink_denoiser(config, quick=False).config
    assert type(small.model) is type(config.model)
    assert (small.objective, small.remat) == (config.objective, config.remat)
    whole: Any = config.model
    if config.model.type == "transformer":
        found: Any = small.model

        def kinds(run: Any) -> Any:
            block = run.block
            mlp = dataclasses.replace(block.mlp, hidden=1)
            return run.tokens, dataclasses.replace(block, mlp=mlp, cross=None), bool(block.cross)

        assert list(map(kinds, found.config.blocks)) == list(map(kinds, whole.config.blocks))
        assert found.config.num_layers <= 2 * len(whole.config.blocks)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_passes(name: str) -> None:
    config = load(DiffusionConfig, file=RECIPES / f"{name}.yaml", overrides={})
    report = preflight(config)
    assert report.ok, report.paragraph()
