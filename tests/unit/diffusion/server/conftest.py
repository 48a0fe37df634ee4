"""A pipeline with a small random network, and its engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.diffusion import SAMPLERS, flow
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.parts import MLP, Dense, Embedding, LayerNorm, timestep_embedding
from fornax.diffusion.pipelines import Pipeline

SIDE, WIDTH = 8, 48
"""48 is a width at which the CPU's products differ in their last bits with the number of rows."""


class Network(nnx.Module):
    """Attention over the rows of a picture, told of time and class."""

    config = None

    def __init__(self):
        make = {"rngs": nnx.Rngs(0), "dtype": jnp.float32, "compute_dtype": jnp.float32}
        self.classes = Embedding(27, WIDTH, std=1.0, **make)
        self.read = Dense(SIDE, WIDTH, **make)
        self.mix = Dense(WIDTH, 3 * WIDTH, **make)
        self.norm = LayerNorm(WIDTH, eps=1e-6)
        self.mlp = MLP(WIDTH, 4 * WIDTH, WIDTH, activation="gelu", **make)
        self.write = Dense(WIDTH, SIDE, **make)

    def __call__(self, x_BHWC, time_B, condition):
        told_BD = timestep_embedding(time_B, WIDTH) + self.classes(condition.classes_B)
        h_BTD = self.read(x_BHWC[..., 0]) + told_BD[:, None]
        q, k, v = jnp.split(self.mix(self.norm(h_BTD)), 3, -1)
        weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / WIDTH**0.5, -1)
        h_BTD = h_BTD + weights @ v
        return self.write(h_BTD + self.mlp(self.norm(h_BTD)))[..., None]


class After(Network):
    """The network, told of the mean of each image that it draws after."""

    def __call__(self, x_BHWC, time_B, condition):
        means = [each.mean((1, 2, 3), keepdims=True) for each in condition.references or ()]
        told = sum((i * mean for i, mean in enumerate(means, start=1)), start=0.0)
        condition = dataclasses.replace(condition, references=None)
        return super().__call__(x_BHWC, time_B, condition) + told


def encode(prompts, size, guidance):
    """A letter is its class; any other prompt is refused by the model."""
    return Condition(
        classes_B=jnp.array([26 if p is None else ord(p[0].upper()) % 26 for p in prompts])
    )


def make_pipeline(**changes) -> Pipeline:
    """The pipeline; keywords are fields of `Pipeline`."""
    fields = {
        "name": "letters",
        "denoiser": Network(),
        "prediction": "flow",
        "schedule": lambda steps, shape: flow(steps),
        "sampler": SAMPLERS["euler"],
        "encode": encode,
        "latent_shape": lambda size: (*size, 1),
        "decode": lambda x: x,
        "to_latents": lambda x: x,
        "size": (SIDE, SIDE),
        "multiple": SIDE,
        "channels": 1,
        "steps": 4,
        "scale": 3.0,
    }
    return Pipeline(**{**fields, **changes})


@pytest.fixture(scope="session")
def pipeline() -> Pipeline:
    """One for all tests, so that its programs compile once."""
    return make_pipeline()


@pytest.fixture
def image() -> np.ndarray:
    """A picture in [-1, 1]."""
    return np.random.default_rng(5).uniform(-1, 1, (SIDE, SIDE, 1)).astype(np.float32)
