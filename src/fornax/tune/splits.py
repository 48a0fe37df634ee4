"""The examples of a run: read, checked and encoded, and what of them is held back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from fornax.config.errors import DataError
from fornax.train.task import Hosts
from fornax.tune.config import TuneConfig
from fornax.tune.data import Codec, Feed, Limit, Loaded
from fornax.tune.policy import Origin

__all__ = ["codec_of", "described", "feed_of", "limit_of", "load_splits"]

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
    config: TuneConfig, origin: Origin, load: Callable[..., Loaded[_Item]], **options: Any
) -> dict[str, Loaded[_Item]]:
    """`train`, and `eval` where the config names or holds back examples to evaluate on.

    Args:
      config: names the files.
      origin: the model, whose tokenizer and template are used.
      load: one of the loaders of `tune.data`, such as `load_pairs`.
      **options: further arguments of `load`.

    Raises:
      DataError: with file and line of what cannot be used; when holding back leaves a side empty.
    """
    codec, limit = codec_of(config, origin), limit_of(config)

    def read(path: str) -> Loaded[_Item]:
        return load(path, codec, limit, columns=config.columns or None, **options)

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


def described(splits: Mapping[str, Loaded[Any]]) -> tuple[str, ...]:
    """A line on each file, and on what of it is held back."""
    lines = dict.fromkeys(part.summary.text() for part in splits.values())
    if "eval" not in splits:
        return tuple(lines)
    return (*lines, f"{len(splits['eval']):,} examples to evaluate on")


def feed_of(config: TuneConfig, hosts: Hosts, *, train: bool) -> Feed:
    """How a split is read: without end to train on, once and in order otherwise."""
    return Feed(
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle and train,
        epochs=None if train else 1,
        virtual_shards=config.shards,
        host_index=hosts.index,
        host_count=hosts.count,
    )
