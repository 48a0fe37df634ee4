"""Plans of diffusion runs: FLOPs beside counts by hand, memory, sampling, refusals."""

import dataclasses
from pathlib import Path

import pytest

from fornax.config import ConfigError, load
from fornax.diffusion.config import DiffusionConfig, DiT
from fornax.mesh import DtypePolicy
from fornax.plan.diffusion import plan_diffusion
from fornax.plan.recipes import recipes_folder
from fornax.plan.topology import parse_topology


def recipe(name: str) -> DiffusionConfig:
    return load(DiffusionConfig, file=Path(recipes_folder() / f"{name}.yaml"))


def test_a_plan_of_letters_counts_the_products_of_its_transformer():
    model = DiT(num_layers=6, num_heads=4, head_dim=32, patch=2)
    # In bfloat16 rotary embeddings are products as well.
    config = dataclasses.replace(recipe("letters"), model=model, dtypes=DtypePolicy())
    plan = plan_diffusion(config, parse_topology("v6e:1x1"), rows=16)
    D, T, L, B, hidden = 128, 64, 6, config.batch_size, 512
    # Of a token in a block: q, k, v and out, the MLP; of an image: the modulation.
    products = L * (B * T * (8 * D * D + 4 * D * hidden) + B * 12 * D * D)
    attention = L * 4 * B * 128**2 * D  # the kernel's least block of tokens is 128
    assert plan.run.model_flops == pytest.approx(3 * (products + attention), rel=0.02)
    assert plan.run.parameters == pytest.approx(1.8e6, rel=0.15)
    assert plan.fits
    step, sample = plan.programs
    assert (step.name, sample.name) == ("train_step", "sample")
    # Eight steps of sixteen images, twice for guidance: forward passes alone.
    assert sample.flops == pytest.approx(8 * 32 / 64 * step.flops / 3, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "parameters"),
    [
        ("flux-dev", "v5p:2x2x1", 11.9e9),
        ("qwen-image", "v5p:2x2x2", 20.4e9),
        ("wan2.1-14b", "v5p:2x2x1", 14.3e9),
        ("sdxl", "v5p:2x2x1", 2.567e9),
    ],
)
def test_recipes_have_the_published_sizes_and_fit(name, topology, parameters):
    plan = plan_diffusion(recipe(name), parse_topology(topology))
    assert plan.run.parameters == pytest.approx(parameters, rel=0.01)
    assert plan.fits
    assert plan.speed.step_seconds > 0
    assert any("splash" in line for line in plan.kernels)


def test_images_from_files_are_refused_with_what_to_plan_instead():
    config = dataclasses.replace(recipe("letters"), data=DiffusionConfig().data)
    with pytest.raises(ConfigError, match=r"data\.type: encoded"):
        plan_diffusion(config, parse_topology("v6e:1x1"))
