"""Transforms: your own by import path, exact repetition, and failures that name the record."""

import dataclasses
import os
import sys
from pathlib import Path

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config import worker_record
from fornax.config.errors import ConfigError, DataError
from fornax.data import (
    DataConfig,
    Dataset,
    FilterLength,
    FilterRegex,
    Jsonl,
    Prefetch,
    Python,
    Text,
    Tokenize,
    Tokenizer,
    load_tokenizer,
    open_batches,
    train_bpe,
)
from fornax.data.transforms import Chain

HERE = "user_transforms"


def shout(record):
    return {**record, "text": record["text"].upper()}


def keep_short(record) -> bool:
    return len(record["text"]) < 5


def fail_on_b(record):
    return {"text": record["text"], "n": 1 // (record["text"] != "b")}


def noise(record, rng):
    return {"tokens": rng.integers(0, 100, 3)}


class Repeat:
    def __init__(self, times: int):
        self.times = times

    def __call__(self, record):
        return {**record, "text": record["text"] * self.times}


class GrainMap(grain.transforms.Map):
    def map(self, element):
        return {"text": f"<{element['text']}>"}


class GrainFilter(grain.transforms.Filter):
    def filter(self, element):
        return element["text"] != "b"


class GrainRandom(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return {"text": f"{element['text']}{rng.integers(1000)}"}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def run(*transforms, texts=("a", "b", "cccccc"), seeds=None):
    chain = Chain(transforms)
    records = [{"text": t} for t in texts]
    for number in range(len(chain)):
        records = chain.stage(
            number, records, seeds or [(0, i) for i in range(len(texts))], lambda i: f"record {i}"
        )
    return [None if r is None else r.get("text", r) for r in records]


def user(name: str, **arguments) -> Python:
    return Python(target=f"{HERE}:{name}", arguments=arguments)


def test_functions_classes_and_grain_transforms():
    assert run(user("shout")) == ["A", "B", "CCCCCC"]
    assert run(user("Repeat", times=2)) == ["aa", "bb", "cccccccccccc"]
    assert run(user("keep_short"), user("shout")) == ["A", "B", None]
    assert run(user("GrainMap")) == ["<a>", "<b>", "<cccccc>"]
    assert run(user("GrainFilter")) == ["a", None, "cccccc"]


def test_random_transforms_repeat_by_their_seed():
    once = run(user("GrainRandom"))
    assert run(user("GrainRandom")) == once
    assert run(user("GrainRandom"), seeds=[(1, i) for i in range(3)]) != once
    drawn = run(user("noise"))
    assert drawn[0]["tokens"].tolist() != drawn[1]["tokens"].tolist()


def test_filters():
    assert run(FilterLength(minimum=2)) == [None, None, "cccccc"]
    assert run(FilterLength(maximum=1)) == ["a", "b", None]
    assert run(FilterRegex(pattern="c+|a")) == ["a", None, "cccccc"]
    assert run(FilterRegex(pattern="c+|a", drop=True)) == [None, "b", None]


def test_a_failure_names_transform_record_and_cause():
    with pytest.raises(
        DataError, match="fail_on_b failed on record 1: ZeroDivisionError"
    ) as caught:
        run(user("fail_on_b"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FilterRegex(pattern="("), "pattern"),
        (lambda: FilterLength(minimum=3, maximum=2), "maximum=2 is below minimum=3"),
        (lambda: run(user("nothing")), "has no function nothing"),
        (lambda: run(Python(target="no.such.module:f")), "raises ModuleNotFoundError"),
    ],
)
def test_wrong_settings_are_named(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["def f(x): return x + 1\n" * 20, "año 2024 \u4f60\u597d"], 320)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text


def test_a_special_token_spelt_out_in_a_text_stays_text(tokenizer: Tokenizer):
    text = "a <|endoftext|> b"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids.tolist()
    assert tokenizer.decode(ids) == text


def test_a_saved_tokenizer_loads_with_its_roles(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_id, loaded.bos_id, loaded.pad_id) == (0, 1, 2)
    assert loaded.encode("return x").tolist() == tokenizer.encode("return x").tolist()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=100 is below 259"):
        train_bpe(["x"], 100)


def test_tokenize_marks_the_ends_and_names_a_missing_token(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    chain = Chain([Tokenize(tokenizer=tmp_path, prepend_bos=True)])
    (record,) = chain.stage(0, [{"text": "x"}], [(0,)], str)
    assert record is not None
    assert record["tokens"].tolist() == [1, *tokenizer.encode("x").tolist(), 0]
    bare = Tokenizer(tokenizer.backend)
    with pytest.raises(DataError, match="has no eos token"):
        bare.encode_batch(["x"], eos=True)


def jsonl(tmp_path: Path, lines: list[str]) -> DataConfig:
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    source = Jsonl(path=str(tmp_path / "d.jsonl"))
    return DataConfig(source=source, virtual_shards=1, shuffle=False, prefetch=Prefetch(buffer=2))


def see_what_is_told(record):
    state = worker_record.read(Path(os.environ["FORNAX_WORKER_RECORD"]))
    SEEN.append((record["text"], state.part, state.record))
    return record


SEEN: list[tuple[str, str, int]] = []


def test_a_worker_tells_which_record_a_function_of_the_users_has(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also while it makes batches ahead; none receives it once the functions are done."""
    path = tmp_path / "record"
    monkeypatch.setenv("FORNAX_WORKER_RECORD", str(path))
    worker_record.create(path, rank=0, hosts=1, epoch=1)
    worker_record.renew()  # that of a test before
    tokenizer.save(tmp_path)
    chain = (FilterRegex(pattern="b", drop=True), user("see_what_is_told"))
    chain = (*chain, Tokenize(tokenizer=tmp_path))
    config = jsonl(tmp_path, [f'{{"text": "{each}"}}' for each in "abcd"])
    config = dataclasses.replace(config, transforms=chain, epochs=1)
    SEEN.clear()
    list(open_batches(config, batch_size=1, seq_len=4))
    assert {each[1:] for each in SEEN} == {("", -1)}  # no record was taken up
    assert worker_record.current() is not None
    try:
        SEEN.clear()
        list(open_batches(config, batch_size=1, seq_len=4))
        assert SEEN == [("a", "main", 0), ("c", "main", 2), ("d", "main", 3)]
        state = worker_record.read(path)
        assert state is not None
        assert state.record == -1
    finally:
        worker_record.renew()


def test_a_failure_in_a_pipeline_names_source_line_and_transform(
    tokenizer: Tokenizer, tmp_path: Path
):
    tokenizer.save(tmp_path)
    chain = (user("fail_on_b"), Tokenize(tokenizer=tmp_path))
    config = jsonl(tmp_path, ['{"text": "a"}', '{"text": "b"}', '{"text": "c"}'])
    config = dataclasses.replace(config, transforms=chain)
    for debug in (False, True):
        batches = open_batches(dataclasses.replace(config, debug=debug), batch_size=1, seq_len=4)
        with pytest.raises(
            DataError,
            match=r"user_transforms:fail_on_b failed on main: .*d\.jsonl line 2 \(index 1\): Zero",
        ) as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        batches.close()


def test_text_without_a_tokenizer_says_what_to_add(tmp_path: Path):
    batches = open_batches(jsonl(tmp_path, ['{"text": "a"}']), batch_size=1, seq_len=4)
    with pytest.raises(DataError, match=r"line 1 \(index 0\) has no tokens, only text: add"):
        next(batches)
    batches.close()


def test_debug_finds_a_negative_token(tmp_path: Path):
    config = jsonl(tmp_path, ['{"text": "a"}'])
    config = dataclasses.replace(config, transforms=(user("negative"),), debug=True)
    with pytest.raises(DataError, match="has the negative token -3"):
        next(open_batches(config, batch_size=1, seq_len=4))


def negative(record):
    return {"tokens": np.array([1, -3])}


def test_every_record_dropped_is_an_empty_pipeline(tmp_path: Path):
    config = jsonl(tmp_path, ['{"text": "a"}'])
    config = dataclasses.replace(config, transforms=(FilterLength(minimum=9),), epochs=1)
    assert list(open_batches(config, batch_size=1, seq_len=4)) == []
    endless = open_batches(dataclasses.replace(config, epochs=None), batch_size=1, seq_len=4)
    with pytest.raises(DataError, match="every record of main was dropped"):
        next(endless)
    endless.close()


def test_unset_and_text_sources_say_what_they_need(tmp_path: Path):
    with pytest.raises(DataError, match="path is not set"):
        open_batches(DataConfig(source=Dataset()), batch_size=8, seq_len=4)
    with pytest.raises(DataError, match="matches no file"):
        open_batches(DataConfig(source=Text(path=str(tmp_path / "x"))), batch_size=8, seq_len=4)
