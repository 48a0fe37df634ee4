"""A run that trains a denoiser, without its data: the task, the facts and the shapes of a batch."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config import ConfigError
from fornax.diffusion.config import DiffusionConfig
from fornax.diffusion.data import EncodedConfig, LettersConfig
from fornax.diffusion.data.examples import Captioned
from fornax.diffusion.letters import COLOURS, FONTS, LETTERS, Letters
from fornax.diffusion.network import Network
from fornax.diffusion.prompts import Prompts, WordsConfig
from fornax.diffusion.setup import Facts
from fornax.diffusion.task import diffusion_task
from fornax.train import Task

__all__ = ["conditions", "planned_batch", "planned_facts", "planned_task"]

Shapes = dict[str, jax.ShapeDtypeStruct]


def planned_task(config: DiffusionConfig) -> Task[Network]:
    """The task of a run whose data is not read.

    Raises:
      ConfigError: see `planned_facts`.
    """
    facts = planned_facts(config)
    return diffusion_task(config, facts, _NoExamples(config, facts), Path())


def planned_facts(config: DiffusionConfig) -> Facts:
    """What follows from the data, without reading it.

    Raises:
      ConfigError: images from files, whose sizes and captions only they tell.
    """
    data = config.data
    if isinstance(data, LettersConfig):
        height, width, channels = Letters(colour=data.colour, size=data.size).shape
        words = [*LETTERS, *FONTS, *(("in", "on", *COLOURS) if data.colour else ())]
        prompts = None if config.text is None else Prompts.of(config.text, words)
        return Facts(channels=channels, sizes=((height, width),), prompts=prompts)
    if isinstance(data, EncodedConfig):
        *size, channels = data.shape
        sizes: Any = (tuple(size),)  # of a video with its frames
        return Facts(channels=channels, sizes=sizes, prompts=None)
    raise ConfigError(
        "data.type=images has sizes and captions that only the files tell; plan with data.type: "
        "encoded and the shapes of what the run trains on, or with data.type: letters"
    )


class _NoExamples(Captioned):
    """Stands for the data: a plan reads none."""

    def __init__(self, config: DiffusionConfig, facts: Facts) -> None:
        self.sizes: list[Any] = list(facts.sizes)
        self.bucket = np.zeros(1, np.int64)
        self.channels, self.identity = facts.channels, "plan"
        self.prompt = config.sample.prompts[:1] or ("",)

    def get(self, index: int, *, mirrored: bool = False, rng: Any = None) -> tuple[Any, str]:
        del mirrored, rng
        return np.zeros((*self.sizes[0], self.channels), np.float32), self.caption(index)

    def caption(self, index: int) -> str:
        del index
        return self.prompt[0]

    def content(self, index: int) -> str:
        return f"{self.identity} {index}"

    def frame(self, index: int) -> tuple[int, ...]:
        del index
        return (*self.sizes[0], 0, 0, *self.sizes[0])

    def texts(self) -> tuple[str, ...]:
        return ()


def planned_batch(config: DiffusionConfig, rows: int) -> Shapes:
    """The arrays of `fornax.diffusion.task.denoising_loss`, of some rows."""
    facts = planned_facts(config)
    shape = (*facts.usual, facts.channels)
    found = {
        "images": jax.ShapeDtypeStruct((rows, *shape), np.float32),
        "weight": jax.ShapeDtypeStruct((rows,), np.float32),
        **{key: jax.ShapeDtypeStruct((rows,), np.int32) for key in ("example", "step", "place")},
    }
    return {**found, **conditions(config, rows)}


def conditions(config: DiffusionConfig, rows: int) -> Shapes:
    """What the network is conditioned on, of some rows of a batch."""
    if isinstance(config.data, EncodedConfig):
        return {
            key: jax.ShapeDtypeStruct((rows, *shape), jnp.dtype(dtype))
            for key, (shape, dtype) in config.data.arrays.items()
        }
    if isinstance(config.text, WordsConfig):
        return {"words": jax.ShapeDtypeStruct((rows, config.text.length), np.int32)}
    return {"classes": jax.ShapeDtypeStruct((rows,), np.int32)} if config.has_text else {}
