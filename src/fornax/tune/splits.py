"""The examples of a run: read, checked and encoded, and what of them is held back."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.train.task import Hosts, Task
from fornax.tune.config import TuneConfig
from fornax.tune.data import Codec, Limit, Loaded, LoaderOptions
from fornax.tune.policy import Origin

__all__ = ["codec_of", "described", "limit_of", "load_splits", "loader_options", "with_steps"]

_Item = TypeVar("_Item")

_HELD_BACK = 20260101


def codec_of(config: TuneConfig, origin: Origin) -> Codec:
    """What encodes the run's data: the model's own tokenizer and template."""
    return Codec(
        origin.tokenizer,
        template=origin.template,
        eos_ids=origin.eos_ids,
        variables=config.template_variables,
    )


def limit_of(config: TuneConfig) -> Limit:
    """The window of the run's sequences."""
    return Limit(max_length=config.max_length, too_long=config.too_long)


def load_splits(
    config: TuneConfig, origin: Origin, load: Callable[..., Loaded[_Item]]
) -> dict[str, Loaded[_Item]]:
    """`train`, and `eval` where the config names or holds back examples to evaluate on.

    Args:
      config: names the files.
      origin: the model, whose tokenizer and template are used.
      load: one of the loaders of `tune.data`, such as `load_pairs`.

    Raises:
      DataError: with file and line of what cannot be used; when holding back leaves a side empty.
    """
    codec, limit = codec_of(config, origin), limit_of(config)

    def read(path: str) -> Loaded[_Item]:
        return load(path, codec, limit, columns=config.columns or None)

    whole = read(config.data)
    if config.eval_data is not None:
        return {"train": whole, "eval": read(config.eval_data)}
    if not config.eval_share:
        return {"train": whole}
    # Whole records: what one line became (several turns, say) shares a prompt.
    records = sorted(set(whole.records))
    held = round(len(records) * config.eval_share)
    if not 0 < held < len(records):
        raise DataError(
            f"eval_share={config.eval_share} of {len(records)} examples holds back {held}; choose "
            "another, or name eval_data"
        )
    # Not the run's seed: runs that differ in it are judged by the same examples.
    order = np.random.default_rng(_HELD_BACK).permutation(len(records))
    back = {records[place] for place in order[:held].tolist()}

    def part(held_back: bool) -> Loaded[_Item]:
        chosen = [n for n, record in enumerate(whole.records) if (record in back) == held_back]
        return dataclasses.replace(
            whole,
            items=[whole.items[n] for n in chosen],
            records=[whole.records[n] for n in chosen],
        )

    return {"train": part(False), "eval": part(True)}


def described(splits: Mapping[str, Loaded[_Item]]) -> tuple[str, ...]:
    """A line on each file, and on what of it is held back."""
    lines = dict.fromkeys(part.summary.text() for part in splits.values())
    if "eval" not in splits:
        return tuple(lines)
    return (*lines, f"{len(splits['eval']):,} examples to evaluate on")


def loader_options(config: TuneConfig, hosts: Hosts, *, train: bool) -> LoaderOptions:
    """How a split is read: without end to train on, once and in order otherwise."""
    return LoaderOptions(
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle and train,
        epochs=None if train else 1,
        virtual_shards=config.shards,
        hosts=hosts,
    )


def with_steps(config: TuneConfig, task: Task) -> TuneConfig:
    """The config with the numbers that follow from the data: steps, and when to evaluate.

    Raises:
      ConfigError: when `steps` and `epochs` both say how long the run is, and disagree.
    """
    per_epoch = task.post.steps_per_epoch
    if config.steps is None or config.epochs is not None:
        if per_epoch is None:
            raise ConfigError("this data has no epochs; say how long the run is with --steps")
        steps = max(1, math.ceil(round((config.epochs or 1.0) * per_epoch, 6)))
        if config.steps not in (None, steps):
            raise ConfigError(
                f"steps={config.steps} and epochs={config.epochs:g}, which are {steps} steps of "
                f"batch_size={config.batch_size}, both say how long the run is; give one of them"
            )
        config = dataclasses.replace(config, steps=steps)
    if config.evaluates and config.eval.every is None:
        every = config.steps or 1
        if per_epoch is not None:
            every = max(1, min(every, math.ceil(per_epoch)))
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, every=every))
    return config
