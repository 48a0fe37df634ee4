"""Operations counted in traces, beside what is counted by hand."""

import dataclasses

import jax
import jax.numpy as jnp

from fornax.diffusion.config import DiffusionConfig, DiT
from fornax.diffusion.cost import traced_flops
from fornax.diffusion.data import LettersConfig
from fornax.diffusion.prompts import LabelsConfig, Prompts
from fornax.diffusion.setup import Facts, flops_per_image


def test_loops_count_as_often_as_they_run_and_branches_once():
    def run(x, kernel, image, window):
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ kernel), None), x, length=5)[0]
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ kernel @ kernel, lambda x: x @ kernel, x)
        return x, jax.lax.conv(image, window, (1, 1), "SAME")

    shapes = ((3, 4), (4, 4), (1, 2, 6, 6), (8, 2, 3, 3))
    found = traced_flops(run, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert found == 2 * 3 * 4 * 4 * (5 + 2) + 2 * 6 * 6 * 8 * 2 * 3 * 3


def test_a_transformer_costs_what_its_products_do():
    """Blocks of 24 D^2 a token and 4 T^2 D an image, modulation, ends; twice that backward."""
    model = DiT(num_layers=3, num_heads=2, head_dim=8, patch=2)
    config = DiffusionConfig(model=model, data=LettersConfig(colour=True), text=LabelsConfig())
    facts = Facts(channels=3, sizes=((32, 32),), prompts=Prompts.of(LabelsConfig(), ["a", "b"]))
    D, T, patch, waves = 16, 256, 12, 256
    block = 24 * T * D**2 + 4 * T**2 * D + 2 * D * 6 * D
    ends = 2 * T * patch * D * 2 + 2 * (waves * D + D * D) + 2 * D * 2 * D
    wanted = 3 * (3 * block + ends)
    assert flops_per_image(config, facts) == wanted
    half = dataclasses.replace(config.dtypes, compute="bfloat16")
    assert flops_per_image(dataclasses.replace(config, dtypes=half), facts) == wanted
