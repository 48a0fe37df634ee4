"""A built dataset is exact, deterministic, and whole or not there."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fornax.config import from_mapping, to_mapping
from fornax.config.errors import ConfigError, DataError
from fornax.data import (
    BuildConfig,
    DataConfig,
    Dataset,
    FilterLength,
    FirstFit,
    Jsonl,
    TokenizerFile,
    TrainBpe,
    build,
    dataset_tokenizer,
    inspect,
    open_batches,
    read_manifest,
    read_texts,
    visualize,
)
from fornax.data.files import Storage

TEXTS = [
    f"Document {i}: " + "the quick brown fox, ¿qué tal? 12345\n" * (i % 7 + 1) for i in range(60)
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return path


def config_of(corpus: Path, output: Path, **fields) -> BuildConfig:
    fields = {"holdout": 0.2, "tokenizer": TrainBpe(vocab_size=300), **fields}
    return BuildConfig(source=Jsonl(path=str(corpus)), output=output, **fields)


def test_texts_come_back_exactly_and_each_once(corpus: Path, tmp_path: Path):
    result = build(config_of(corpus, tmp_path / "d"))
    train = list(read_texts(tmp_path / "d", "train"))
    held_out = list(read_texts(tmp_path / "d", "eval"))
    assert sorted(train + held_out) == sorted(TEXTS)
    assert set(train).isdisjoint(held_out)
    assert 3 <= len(held_out) <= 25
    split = result.manifest.splits["eval"]
    assert split.text_bytes == sum(len(t.encode()) for t in held_out)
    tokenizer = dataset_tokenizer(tmp_path / "d")
    assert tokenizer is not None
    assert split.tokens == sum(len(tokenizer.encode(t)) + 1 for t in held_out)
    assert result.manifest == read_manifest(tmp_path / "d")
    assert not list(tmp_path.glob(".*building*"))


def test_the_same_build_gives_the_same_bytes_and_is_kept(corpus: Path, tmp_path: Path):
    first = build(config_of(corpus, tmp_path / "a"))
    second = build(config_of(corpus, tmp_path / "b"))
    assert first.manifest.fingerprint == second.manifest.fingerprint
    again = build(config_of(corpus, tmp_path / "a"))
    assert again.reused
    assert again.manifest == first.manifest


def test_another_dataset_in_the_folder_is_kept_unless_told(corpus: Path, tmp_path: Path):
    build(config_of(corpus, tmp_path / "d"))
    other = config_of(corpus, tmp_path / "d", tokenizer=TrainBpe(vocab_size=280))
    with pytest.raises(DataError, match="built with another tokenizer"):
        build(other)
    assert build(other, overwrite=True).manifest.vocab_size == 280


def test_a_folder_of_other_files_is_never_touched(corpus: Path, tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="is not a dataset"):
            build(config_of(corpus, tmp_path / "d"), overwrite=overwrite)
    assert (tmp_path / "d" / "thesis.txt").read_text() == "years of work"


def test_a_failed_build_leaves_what_was_there(corpus: Path, tmp_path: Path):
    build(config_of(corpus, tmp_path / "d"))
    before = read_manifest(tmp_path / "d")
    with corpus.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl line 61 is not valid JSON"):
        build(config_of(corpus, tmp_path / "d"), overwrite=True)
    assert read_manifest(tmp_path / "d") == before
    assert [p.name for p in tmp_path.iterdir() if "building" in p.name] == []


def test_shards_hold_all_records_in_order(corpus: Path, tmp_path: Path):
    result = build(config_of(corpus, tmp_path / "d", shard_bytes=500, holdout=0.0))
    assert len(result.manifest.splits["train"].shards) > 5
    assert list(read_texts(tmp_path / "d", "train")) == TEXTS


def test_long_documents_are_stored_in_pieces(corpus: Path, tmp_path: Path):
    whole = build(config_of(corpus, tmp_path / "a", holdout=0.0)).manifest.splits["train"]
    cut = build(config_of(corpus, tmp_path / "b", holdout=0.0, max_record_tokens=20))
    split = cut.manifest.splits["train"]
    assert split.tokens == whole.tokens
    assert split.text_bytes == whole.text_bytes
    source = Dataset(path=str(tmp_path / "b")).open(Storage())
    assert max(len(source[i]["tokens"]) for i in range(len(source))) == 20
    assert "".join(read_texts(tmp_path / "b", "train")) == "".join(TEXTS)


def test_text_is_stored_without_a_tokenizer(corpus: Path, tmp_path: Path):
    manifest = build(config_of(corpus, tmp_path / "d", tokenizer=None, holdout=0.0)).manifest
    assert (manifest.content, manifest.tokenizer) == ("text", None)
    assert list(read_texts(tmp_path / "d", "train")) == TEXTS


def test_an_existing_tokenizer_is_used(corpus: Path, tmp_path: Path):
    build(config_of(corpus, tmp_path / "a"))
    folder = tmp_path / "a" / "tokenizer"
    config = config_of(corpus, tmp_path / "b", tokenizer=TokenizerFile(path=folder))
    assert build(config).manifest.fingerprint == read_manifest(tmp_path / "a").fingerprint


def test_dropped_records_are_counted(corpus: Path, tmp_path: Path):
    config = config_of(corpus, tmp_path / "d", transforms=(FilterLength(maximum=100),))
    manifest = build(config).manifest
    assert manifest.dropped == {"filter_length": sum(len(t) > 100 for t in TEXTS)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transforms": (FilterLength(minimum=10**6),)}, "there is no text to train"),
        ({"transforms": (FilterLength(minimum=10**6),), "tokenizer": None}, "the corpus is empty"),
        ({"holdout": 1e-9}, "left the eval split without records"),
        (
            {"text_field": "body"},
            r"line 1: there is no field 'body'; the record has text: name the one",
        ),
        ({"tokenizer": TokenizerFile(path=Path("none.json"))}, r"none\.json does not exist"),
    ],
)
def test_what_cannot_be_built_is_named(corpus: Path, tmp_path: Path, fields, message: str):
    with pytest.raises(DataError, match=message):
        build(config_of(corpus, tmp_path / "d", **fields))
    assert not (tmp_path / "d").exists()


def test_an_empty_file_is_an_empty_corpus(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="the corpus is empty"):
        build(config_of(tmp_path / "empty.jsonl", tmp_path / "d"))


@pytest.mark.parametrize(
    "fields", [{"holdout": 1.0}, {"shard_bytes": 0}, {"max_record_tokens": 8, "tokenizer": None}]
)
def test_settings_that_make_no_sense_are_refused(fields):
    with pytest.raises(ConfigError):
        BuildConfig(**fields)


def test_a_shard_cut_short_is_named_and_a_dataset_without_its_end_is_none(
    corpus: Path, tmp_path: Path
):
    build(config_of(corpus, tmp_path / "d"))
    config = DataConfig(source=Dataset(path=str(tmp_path / "d")), virtual_shards=2)
    shard = tmp_path / "d" / "train-00000.array_record"
    shard.write_bytes(shard.read_bytes()[:-100])
    with (
        pytest.raises(DataError, match=r"train-00000\.array_record is not a whole"),
        open_batches(config, batch_size=2, seq_len=8) as batches,
    ):
        next(batches)
    (tmp_path / "d" / "dataset.json").unlink()
    with pytest.raises(DataError, match="is not a finished dataset"):
        open_batches(config, batch_size=2, seq_len=8)


def test_a_shard_of_another_build_is_named(corpus: Path, tmp_path: Path):
    build(config_of(corpus, tmp_path / "a", holdout=0.0))
    build(config_of(corpus, tmp_path / "b", holdout=0.0, max_record_tokens=9))
    name = "train-00000.array_record"
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    config = DataConfig(source=Dataset(path=str(tmp_path / "a")), virtual_shards=2)
    with pytest.raises(DataError, match=r"records where its dataset\.json says 60"):
        next(open_batches(config, batch_size=2, seq_len=8))


def test_inspect_measures_what_packing_does(corpus: Path, tmp_path: Path):
    manifest = build(config_of(corpus, tmp_path / "d")).manifest
    found = inspect(tmp_path / "d", seq_len=64, packing=FirstFit(bins=4))
    assert found.tokens == manifest.splits["train"].tokens
    assert found.records == found.documents == manifest.splits["train"].records
    assert sum(b.records for b in found.histogram) == found.documents
    assert found.samples[0].startswith("Document ")
    config = DataConfig(
        source=Dataset(path=str(tmp_path / "d")),
        packing=FirstFit(bins=4),
        virtual_shards=1,
        shuffle=False,
        epochs=1,
    )
    batches = list(open_batches(config, batch_size=1, seq_len=64))
    assert len(batches) == found.rows
    used = sum(int((b["segment_ids"] > 0).sum()) for b in batches)
    assert used / (64 * found.rows) == pytest.approx(found.fill_rate)
    dropping = inspect(tmp_path / "d", seq_len=64, packing=FirstFit(bins=4, long_documents="drop"))
    assert dropping.dropped_tokens > 0
    assert dropping.cut_documents == 0 < found.cut_documents


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_picture_shows_every_stage_with_its_counts(corpus: Path, tmp_path: Path, suffix: str):
    build(config_of(corpus, tmp_path / "d", tokenizer=None, holdout=0.0))
    build(config_of(corpus, tmp_path / "t"))
    config = from_mapping(
        DataConfig,
        {
            "source": {"type": "dataset", "path": str(tmp_path / "d")},
            "transforms": [
                {"type": "filter_length", "maximum": 100},
                {"type": "tokenize", "tokenizer": str(tmp_path / "t" / "tokenizer")},
            ],
            "virtual_shards": 1,
            "epochs": 1,
        },
    )
    assert from_mapping(DataConfig, to_mapping(config)) == config
    picture = tmp_path / "out" / f"p.{suffix}"
    found = visualize(config, picture, batch_size=1, seq_len=16, batches=10**6)
    ((_, stages),) = found.parts
    kept = sum(len(t) <= 100 for t in TEXTS)
    assert [(s.name, s.entered, s.left) for s in stages] == [
        ("read", 60, 60),
        ("filter_length", 60, kept),
        ("tokenize", kept, kept),
    ]
    text = picture.read_text()
    for word in ("filter_length", "tokenize", "concat_then_split", f"{60 - kept} dropped"):
        assert word in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert sum(s.seconds for s in (*stages, *found.shared)) <= found.seconds


def test_a_picture_needs_a_known_suffix(tmp_path: Path):
    with pytest.raises(DataError, match=r"must end in \.svg or \.html"):
        visualize(DataConfig(), tmp_path / "p.png")


def test_token_ids_are_stored_as_small_as_they_fit(corpus: Path, tmp_path: Path):
    manifest = build(config_of(corpus, tmp_path / "d")).manifest
    assert manifest.content == "uint16"
    config = DataConfig(source=Dataset(path=str(tmp_path / "d")), virtual_shards=1)
    batch = next(open_batches(config, batch_size=1, seq_len=32))
    assert {k: v.dtype for k, v in batch.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "segment_ids": np.int32,
        "positions": np.int32,
        "loss_weights": np.float32,
    }
