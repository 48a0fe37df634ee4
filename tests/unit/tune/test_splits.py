"""What is held back is the same for every seed, and nothing is in both parts."""

import dataclasses
from typing import Any

import pytest

from fornax.config.errors import DataError
from fornax.train.task import Hosts
from fornax.tune.config import SFTConfig
from fornax.tune.data import Loaded, Summary
from fornax.tune.splits import described, feed_of, load_splits

CONFIG = SFTConfig(model="m", data="d", batch_size=4)


class Origin:
    tokenizer = template = None
    eos_ids = ()


@pytest.fixture(autouse=True)
def plain_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fornax.tune.splits.codec_of", lambda config, origin: "codec")


def load(path: str, codec: Any, limit: Any, columns: Any, count: int = 10) -> Loaded[str]:
    assert codec == "codec"
    items = [f"{path}{n}" for n in range(count)]
    return Loaded(items=items, summary=Summary(name=path), records=list(range(count)))


def split(config: SFTConfig, **options: Any) -> dict[str, list[str]]:
    found = load_splits(config, Origin(), load, **options)  # pyrefly: ignore[bad-argument-type]
    return {name: loaded.items for name, loaded in found.items()}


def test_a_share_is_held_back_whatever_the_seed():
    config = dataclasses.replace(CONFIG, eval_share=0.3)
    first = split(config)
    assert len(first["eval"]) == 3
    assert sorted(first["train"] + first["eval"]) == split(CONFIG)["train"]
    assert split(dataclasses.replace(config, seed=7)) == first


def test_what_one_line_became_stays_together():
    def twice(*given: Any, **options: Any) -> Loaded[str]:
        lines = load(*given, **options)
        doubled = [item for item in lines.items for _ in range(2)]
        return Loaded(items=doubled, summary=lines.summary, records=[n // 2 for n in range(20)])

    config = dataclasses.replace(CONFIG, eval_share=0.3)
    found = load_splits(config, Origin(), twice)  # pyrefly: ignore[bad-argument-type]
    train, held = (set(found[name].items) for name in ("train", "eval"))
    assert not train & held
    assert len(found["eval"].items) == 6


def test_evaluation_data_of_its_own_leaves_the_training_data_whole():
    found = split(dataclasses.replace(CONFIG, eval_data="e"))
    assert len(found["train"]) == 10
    assert found["eval"][0] == "e0"


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_that_leaves_a_part_empty_is_refused(share: float):
    with pytest.raises(DataError, match=r"of 10 examples holds back"):
        split(dataclasses.replace(CONFIG, eval_share=share))


def test_the_log_says_what_is_evaluated_on():
    config = dataclasses.replace(CONFIG, eval_share=0.2)
    lines = described(load_splits(config, Origin(), load))  # pyrefly: ignore[bad-argument-type]
    assert len(lines) == 2
    assert lines[1] == "2 examples to evaluate on"


def test_only_training_is_shuffled_and_endless():
    train, held = (feed_of(CONFIG, Hosts(), train=train) for train in (True, False))
    assert (train.shuffle, train.epochs) == (True, None)
    assert (held.shuffle, held.epochs) == (False, 1)
