"""What is held back is the same for every seed, and nothing is in both parts."""

import dataclasses
import json
from pathlib import Path

import pytest
from tests.unit.tune.tiny import save_model

from fornax.config.errors import DataError
from fornax.train.task import Hosts
from fornax.tune import Origin, SFTConfig, read_origin
from fornax.tune.data import Encoded, LabelledTokens, Loaded, load_examples, load_labelled
from fornax.tune.splits import described, load_splits, loader_options

Run = tuple[SFTConfig, Origin]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model, ten texts to train on, and three others."""
    folder = tmp_path_factory.mktemp("splits")
    for name, count in (("d", 10), ("e", 3)):
        lines = [{"text": f"{name} number {n}"} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = str(folder / "d.jsonl")
    config = SFTConfig(model=str(save_model(folder)), data=data, batch_size=4)
    return config, read_origin(config)


def tokens(loaded: Loaded[Encoded]) -> list[bytes]:
    return [item.tokens.tobytes() for item in loaded.items]


def split(run: Run, **changes: object) -> dict[str, list[bytes]]:
    config = dataclasses.replace(run[0], **changes)
    found = load_splits(config, run[1], load_examples)
    return {name: tokens(loaded) for name, loaded in found.items()}


def test_a_share_is_held_back_whatever_the_seed(run: Run) -> None:
    first = split(run, eval_share=0.3)
    assert len(first["eval"]) == 3
    assert sorted(first["train"] + first["eval"]) == sorted(split(run)["train"])
    assert split(run, eval_share=0.3, seed=7) == first


def test_what_one_line_became_stays_together(run: Run, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{n}?", "chosen": " yes", "rejected": " no"} for n in range(10)]
    pairs.write_text("\n".join(map(json.dumps, lines)))
    config = dataclasses.replace(run[0], data=str(pairs), eval_share=0.3)
    found = load_splits(config, run[1], load_labelled)

    def prompts(items: list[LabelledTokens]) -> set[bytes]:
        return {each.sequence.tokens[: each.sequence.prompt].tobytes() for each in items}

    assert not prompts(found["train"].items) & prompts(found["eval"].items)
    assert len(found["eval"].items) == 6


def test_evaluation_data_of_its_own_leaves_the_training_data_whole(run: Run) -> None:
    other = str(Path(run[0].data).with_name("e.jsonl"))
    found = split(run, eval_data=other)
    assert found["train"] == split(run)["train"]
    assert found["eval"] == split(run, data=other)["train"]


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_that_leaves_a_part_empty_is_refused(run: Run, share: float) -> None:
    with pytest.raises(DataError, match=r"of 10 examples holds back"):
        split(run, eval_share=share)


def test_the_log_says_what_is_evaluated_on(run: Run) -> None:
    config = dataclasses.replace(run[0], eval_share=0.2)
    lines = described(load_splits(config, run[1], load_examples))
    assert len(lines) == 2
    assert lines[1] == "2 examples to evaluate on"


def test_only_training_is_shuffled_and_endless(run: Run) -> None:
    train, held = (loader_options(run[0], Hosts(), train=train) for train in (True, False))
    assert (train.shuffle, train.epochs) == (True, None)
    assert (held.shuffle, held.epochs) == (False, 1)
