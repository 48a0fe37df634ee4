"""From files to sequences in the window: what is refused, left out, cut and counted."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.unit.tune.data.chats import FORGETFUL, chat, codec, write

from fornax.config.errors import ConfigError, DataError
from fornax.tune.data import (
    Codec,
    Limit,
    load_examples,
    load_labelled,
    load_pairs,
    load_prompts,
)

LONG = "one " * 40


def test_what_the_template_refuses_is_named_by_line(tmp_path: Path, plain: Codec) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [{"messages": chat("a", "b")}, {"messages": chat("a <|im_end|>", "b")}, {"text": ""}],
    )
    with pytest.raises(DataError) as caught:
        load_examples(path, plain, Limit(max_length=64))
    assert f"{path}:2: message 1 (user) spells" in str(caught.value)
    assert f"{path}:3: text is empty" in str(caught.value)


def test_a_long_example_is_an_error_unless_told_otherwise(tmp_path: Path, plain: Codec) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": LONG},
            {"prompt": LONG, "completion": "b"},
        ],
    )
    with pytest.raises(DataError) as caught:
        load_examples(path, plain, Limit(max_length=32))
    assert f"{path}:2: has " in str(caught.value)
    assert f"{path}:3: has " in str(caught.value)
    assert "the window is 32; shorten it, raise max_length, or set too_long" in str(caught.value)
    dropped = load_examples(path, plain, Limit(max_length=32, too_long="drop"))
    assert (len(dropped), dropped.summary.dropped) == (1, 2)
    assert "2 dropped as too long" in dropped.summary.text()
    cut = load_examples(path, plain, Limit(max_length=32, too_long="truncate"))
    assert [item.length for item in cut.items] == [dropped.items[0].length, 32]
    assert cut.items[1].tokens[-1] not in plain.eos_ids
    counts = dataclasses.asdict(cut.summary)
    assert (counts["records"], counts["truncated"], counts["untrainable"]) == (3, 1, 1)
    assert counts["tokens"] == sum(item.length for item in cut.items)
    assert counts["trained_tokens"] == sum(item.trained for item in cut.items)
    assert counts["longest"] == 32


def test_nothing_left_is_an_error(tmp_path: Path, plain: Codec) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": LONG}])
    with pytest.raises(DataError, match="nothing is left; raise max_length"):
        load_examples(path, plain, Limit(max_length=8, too_long="drop"))
    with pytest.raises(ConfigError, match="must be at least 2"):
        Limit(max_length=1)


def test_pairs_are_cut_at_the_beginning_of_their_prompt(tmp_path: Path) -> None:
    made = codec("<|begin|>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    lines = [
        {"prompt": LONG, "chosen": "two", "rejected": "is three", "margin": 0.5},
        {"prompt": "a", "chosen": LONG, "rejected": "b"},
    ]
    path = write(tmp_path / "a.jsonl", lines)
    with pytest.raises(DataError, match=":1: has"):
        load_pairs(path, made, Limit(max_length=24))
    whole = load_pairs(path, made, Limit(max_length=500)).items[0]
    cut, other = load_pairs(path, made, Limit(max_length=24, too_long="truncate")).items
    np.testing.assert_array_equal(
        cut.chosen.tokens[: cut.chosen.prompt], cut.rejected.tokens[: cut.rejected.prompt]
    )
    for mine, theirs in ((cut.chosen, whole.chosen), (cut.rejected, whole.rejected)):
        np.testing.assert_array_equal(mine.tokens[mine.mask], theirs.tokens[theirs.mask])
    assert max(cut.chosen.length, cut.rejected.length) == 24
    assert cut.margin == 0.5
    assert other.chosen.length == 24
    assert other.chosen.prompt == other.rejected.prompt > 0


def test_a_cut_prompt_keeps_its_first_token(tmp_path: Path) -> None:
    made = codec("<|begin|>{% for m in messages %}{{ m.content }}{% endfor %}")
    path = write(tmp_path / "a.jsonl", [{"messages": chat(LONG), "answer": 3}])
    (prompt,) = load_prompts(path, made, Limit(max_length=10, too_long="truncate")).items
    whole = made.prompt(chat(LONG))
    np.testing.assert_array_equal(prompt.tokens, [whole[0], *whole[-9:]])
    assert prompt.tokens[0] == made.bos_id
    assert prompt.record == {"answer": 3}
    assert prompt.where == f"{path}:1"


def test_labels_and_whole_texts_are_loaded(tmp_path: Path, plain: Codec) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "label": bool(i)} for i in (0, 1)]
    )
    found = load_labelled(path, plain, Limit(max_length=24))
    assert [item.label for item in found.items] == [False, True]
    texts = load_examples(path, plain, Limit(max_length=24), full=True)
    assert all(item.trained == item.length - 1 for item in texts.items)


def test_items_know_the_record_they_come_from(tmp_path: Path) -> None:
    made = codec(FORGETFUL)
    messages = chat("one", "two", "three", "what")
    messages[1]["reasoning_content"] = "is"
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": messages}, {"text": "b"}])
    found = load_examples(path, made, Limit(max_length=64))
    assert found.records == [0, 1, 1, 2]
    assert found.summary.split == 1
