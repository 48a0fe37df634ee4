"""Training of denoisers, as a preflight sees it.

The reference shares the network and the formulas of the objective with the trainer, which have
oracles of their own; noise, times and the mean over a batch are written down row by row.

Legend: B rows, X the shape of an example.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.diffusion.config import DiffusionConfig
from fornax.diffusion.data import EncodedConfig
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import Objective
from fornax.diffusion.prompts import LabelsConfig, Prompts
from fornax.diffusion.setup import Facts, make_network, network_config
from fornax.diffusion.task import diffusion_task
from fornax.optim.tree import flatten
from fornax.preflight.shrink_denoiser import example_shape, shrink_denoiser
from fornax.preflight.subject import PlainLoss, Rows, Subject
from fornax.train import Hosts, Task

__all__ = ["DENOISER"]

_EXAMPLES = 1 << 12
_WORDS = tuple("abcdefghijklmn")
"""With the two ids of padding and of no caption, sixteen rows of a table: they divide."""


class _RandomExamples:
    """Noise for images or latents of a small config, with captions or states of text."""

    def __init__(self, config: DiffusionConfig) -> None:
        *size, self.channels = example_shape(config)
        self.sizes: Any = [tuple(size)]
        self.bucket = np.zeros(_EXAMPLES, np.int64)
        self.identity = f"preflight {config.seed}"
        self._config = config

    def _draws(self, index: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self._config.seed, index, what])

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, str]:
        del rng
        shape = (*self.sizes[0], self.channels)
        found = self._draws(index, 0).uniform(-1, 1, shape).astype(np.float32)
        return found[:, ::-1] if mirrored else found, self.caption(index)

    def arrays(
        self, index: int, *, dropped: bool = False, mirrored: bool = False
    ) -> dict[str, np.ndarray]:
        """Of a dropped caption zeros, as encoded examples have; texts are of unequal lengths."""
        del mirrored  # nothing here is of the image
        data, draws = self._config.data, self._draws(index, 1)
        found: dict[str, np.ndarray] = {}
        if not isinstance(data, EncodedConfig):
            return found
        for name, (shape, _) in data.arrays.items():
            if name == "guidance":
                found[name] = np.asarray(data.guidance, np.float32)
            elif name == "text_mask":
                ones = shape[0] if dropped else draws.integers(1, shape[0], endpoint=True)
                found[name] = (np.arange(shape[0]) < ones).astype(np.int32)
            elif name == "sizes":
                found[name] = draws.integers(0, 1024, shape).astype(np.float32)
            else:
                drawn = draws.standard_normal(shape, np.float32)
                found[name] = np.zeros_like(drawn) if dropped else drawn
        return found

    def caption(self, index: int) -> str:
        text, draws = self._config.text, self._draws(index, 2)
        count = 1 if text is None or isinstance(text, LabelsConfig) else min(3, text.length)
        return " ".join(draws.choice(_WORDS, count)) if text is not None else ""

    def weight(self, index: int) -> float:
        """Unequal, so that a mean of means is not the mean; sums of quarters are exact."""
        return 0.25 * (1 + index % 7)

    def content(self, index: int) -> str:
        return f"{self.identity} {index}"

    def frame(self, index: int) -> tuple[int, ...]:
        del index
        return (*self.sizes[0], 0, 0, *self.sizes[0])

    def texts(self) -> Iterable[str]:
        return _WORDS


def _facts(config: DiffusionConfig) -> Facts:
    *size, channels = example_shape(config)
    sizes: Any = (tuple(size),)
    prompts = None if config.text is None else Prompts.of(config.text, _WORDS)
    return Facts(channels=channels, sizes=sizes, prompts=prompts)


def _task(config: DiffusionConfig, implementation: str | None = None) -> Task[Network]:
    assert implementation is None, "attention of denoisers is what the trainer chooses"
    return diffusion_task(config, _facts(config), _RandomExamples(config), Path())


def _model(config: DiffusionConfig) -> Network:
    return nnx.eval_shape(
        lambda: make_network(
            config,
            _facts(config),
            nnx.Rngs(0),
            dtype=config.dtypes.param_dtype,
            compute_dtype=config.dtypes.compute_dtype,
        )
    )


def _plain_loss(config: DiffusionConfig) -> PlainLoss:
    objective, seed = config.objective, config.seed

    def loss(network: Network, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        data_BX = batch["images"]
        B, *shape = data_BX.shape
        rows = range(B)
        keys = [_key(seed, batch["step"][b], batch["example"][b]) for b in rows]
        noise_BX = jnp.stack([jax.random.normal(jax.random.fold_in(k, 0), shape) for k in keys])
        u_B = jnp.stack(
            [jax.random.uniform(jax.random.fold_in(k, 1), (), minval=2.0**-24) for k in keys]
        )
        if config.stratified:
            u_B = (batch["place"] + u_B) / config.batch_size
        loss_B = _row_losses(network, objective, batch, noise_BX, u_B)
        weight_B = batch["weight"]
        return sum(loss_B[b] * weight_B[b] for b in rows) / jnp.sum(weight_B), jnp.zeros(())

    return loss


def _key(seed: int, step: jax.Array, example: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), example)


def _row_losses(
    network: Network,
    objective: Objective,
    batch: Mapping[str, Any],
    noise_BX: jax.Array,
    u_B: jax.Array,
) -> jax.Array:
    point = objective.point(u_B)
    data_BX = batch["images"]
    x_BX = objective.noised(data_BX, noise_BX, point)
    output_BX = network(x_BX, objective, point, network.condition(batch))
    return objective.losses(output_BX, data_BX, noise_BX, point)


def _rows(config: DiffusionConfig) -> Rows:
    batches = _task(config).batches("train", Hosts())
    try:
        return next(batches)
    finally:
        batches.close()


def _terms(config: DiffusionConfig, rows: Rows) -> int:
    del config
    return max(x.size for x in rows.values())


def _without_remat(config: DiffusionConfig) -> DiffusionConfig:
    return dataclasses.replace(config, remat="none")


def _sizes(config: DiffusionConfig) -> dict[str, Any]:
    whole = network_config(config, _facts(config))
    parameters = sum(math.prod(x.shape) for x in flatten(nnx.state(_model(config))).values())
    shape = list(example_shape(config))
    text = f"{type(whole).__name__.removesuffix('Config')} of {parameters:,} parameters"
    return {
        "parameters": parameters,
        "batch_size": config.batch_size,
        "shape": shape,
        "summary": f"{text}, {config.batch_size} examples of {' x '.join(map(str, shape))}",
    }


DENOISER = Subject(
    shrink=shrink_denoiser,
    task=_task,
    model=_model,
    plain_loss=_plain_loss,
    rows=_rows,
    weights="weight",
    content="images",
    zeros=("images", "weight"),  # the rest is as of an example without its caption
    terms=_terms,
    without_remat=_without_remat,
    sizes=_sizes,
    left_out=lambda config: None,
)
