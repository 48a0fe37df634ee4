"""Every source reads what its format's writer wrote, and names what is wrong with a bad file."""

import dataclasses
import gzip
import json
import pickle
import sys
from pathlib import Path

import bagz
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fornax.config.errors import ConfigError, DataError
from fornax.data import (
    ArrayRecord,
    Bagz,
    HuggingFace,
    Jsonl,
    Parquet,
    PythonSource,
    Stdlib,
    Text,
    Tfds,
)
from fornax.data.files import Storage
from fornax.data.records import Source as OpenSource
from fornax.data.sources.array_record import open_writer

TEXTS = ["one", "zwei ü", "три", "four\nlines", "five", "six"]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "cache")


def write_array_record(path: Path, records: list[bytes]) -> None:
    writer = open_writer(path, compression=True)
    for record in records:
        writer.write(record)
    writer.close()


def write_jsonl(path: Path, rows: list[object]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def make_text(root: Path):
    for i, text in enumerate(TEXTS):
        (root / f"{i}.txt").write_text(text)
    return Text(path=str(root / "*.txt"))


def make_jsonl(root: Path):
    write_jsonl(root / "a.jsonl", [{"text": t, "n": i} for i, t in enumerate(TEXTS[:2])])
    write_jsonl(root / "b.jsonl.gz", [{"text": t} for t in TEXTS[2:]])
    return Jsonl(path=(str(root / "a.jsonl"), str(root / "b.jsonl.gz")))


def make_parquet(root: Path):
    table = pa.table({"text": TEXTS, "n": range(len(TEXTS))})
    pa.parquet.write_table(table, root / "a.parquet", row_group_size=2)
    return Parquet(path=str(root / "a.parquet"))


def make_array_record(root: Path):
    write_array_record(root / "a-0.array_record", [t.encode() for t in TEXTS[:4]])
    write_array_record(root / "a-1.array_record", [t.encode() for t in TEXTS[4:]])
    return ArrayRecord(path=str(root / "a-*.array_record"))


def make_bagz(root: Path):
    for name, part in (("a.bagz", TEXTS[:4]), ("b.bagz", TEXTS[4:])):
        writer = bagz.Writer(str(root / name))
        for text in part:
            writer.write(text.encode())
        writer.close()
    return Bagz(path=str(root / "*.bagz"))


def nested(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field, written by hand so that the reader's schema is checked."""
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


def make_tfds(root: Path):
    features = {
        "text": {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text"},
        "label": {"pythonClassName": "tensorflow_datasets.core.features.class_label.ClassLabel"},
        "ids": {
            "pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor",
            "tensor": {"dtype": "int32", "shape": {"dimensions": ["2", "2"]}},
        },
    }
    (root / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    split = {"name": "train", "shardLengths": ["4", "2"]}
    info = {"name": "toy", "fileFormat": "array_record", "splits": [split]}
    (root / "dataset_info.json").write_text(json.dumps(info))
    examples = []
    for i, text in enumerate(TEXTS):
        values = {
            "text": nested(1, nested(1, text.encode())),
            "label": nested(3, nested(1, bytes([i]))),
            "ids": nested(3, nested(1, bytes([i, 1, 2, 3]))),
        }
        entries = (nested(1, nested(1, k.encode()) + nested(2, v)) for k, v in values.items())
        examples.append(nested(1, b"".join(entries)))
    write_array_record(root / "toy-train.array_record-00000-of-00002", examples[:4])
    write_array_record(root / "toy-train.array_record-00001-of-00002", examples[4:])
    return Tfds(path=str(root))


def make_hugging_face(root: Path):
    """The layout of `datasets.Dataset.save_to_disk`."""
    files = []
    for i, part in enumerate((TEXTS[:4], TEXTS[4:])):
        table = pa.table({"text": part, "n": range(len(part))})
        name = f"data-{i:05d}-of-00002.arrow"
        with pa.ipc.new_stream(str(root / name), table.schema) as stream:
            stream.write_table(table)
        files.append({"filename": name})
    (root / "state.json").write_text(json.dumps({"_data_files": files}))
    (root / "dataset_info.json").write_text("{}")
    return HuggingFace(path=str(root))


FORMATS = [
    make_text,
    make_jsonl,
    make_parquet,
    make_array_record,
    make_bagz,
    make_tfds,
    make_hugging_face,
]


@pytest.mark.parametrize("make", FORMATS)
def test_records_come_back_in_any_order(make, tmp_path: Path, storage: Storage):
    source = make(tmp_path).open(storage)
    assert isinstance(source, OpenSource)
    assert len(source) == len(TEXTS)
    assert [source[i]["text"] for i in range(len(TEXTS))] == TEXTS
    order = [5, 0, 3, 3, 1, 4]
    assert [r["text"] for r in source.__getitems__(order)] == [TEXTS[i] for i in order]
    assert len({source.locate(i) for i in range(len(TEXTS))}) == len(TEXTS)


@pytest.mark.parametrize("make", FORMATS)
def test_an_open_source_can_be_sent_to_a_worker(make, tmp_path: Path, storage: Storage):
    source = make(tmp_path).open(storage)
    source.__getitems__([1])
    copy = pickle.loads(pickle.dumps(source))
    assert copy[2]["text"] == TEXTS[2]
    assert copy.identity() == source.identity()


def test_tfds_features_are_decoded(tmp_path: Path, storage: Storage):
    record = make_tfds(tmp_path).open(storage)[4]
    assert record["label"] == 4
    assert record["ids"].dtype == np.int32
    assert record["ids"].tolist() == [[4, 1], [2, 3]]


def test_hugging_face_dict_needs_its_split(tmp_path: Path, storage: Storage):
    folder = tmp_path / "train"
    folder.mkdir()
    make_hugging_face(folder)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert len(HuggingFace(path=str(tmp_path), split="train").open(storage)) == len(TEXTS)
    with pytest.raises(DataError, match="a DatasetDict with the splits train"):
        HuggingFace(path=str(tmp_path), split="test").open(storage)


def test_jsonl_names_the_bad_line(tmp_path: Path, storage: Storage):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": "b"\n[1]\n')
    source = Jsonl(path=str(path)).open(storage)
    assert len(source) == 3
    with pytest.raises(DataError, match=r"bad\.jsonl line 4 is not valid JSON"):
        source[1]
    with pytest.raises(DataError, match=r"line 5 is list, it must be a JSON object"):
        source[2]


@pytest.mark.parametrize("cut", [1.0, 0.5, 0.02, 0.0])
def test_a_truncated_array_record_is_named(tmp_path: Path, storage: Storage, cut: float):
    path = tmp_path / "cut.array_record"
    rng = np.random.default_rng(0)
    write_array_record(path, [rng.bytes(400) for _ in range(2000)])
    data = path.read_bytes()
    path.write_bytes(data[: min(len(data) - 10, int(cut * len(data)))])
    with pytest.raises(DataError, match=r"cut\.array_record is not a whole ArrayRecord file"):
        ArrayRecord(path=str(path), content="bytes").open(storage)


def test_damage_inside_an_array_record_is_named_when_read(tmp_path: Path, storage: Storage):
    path = tmp_path / "hurt.array_record"
    rng = np.random.default_rng(0)
    write_array_record(path, [rng.bytes(400) for _ in range(2000)])
    data = bytearray(path.read_bytes())
    data[400_000:402_000] = bytes(2000)
    path.write_bytes(data)
    source = ArrayRecord(path=str(path), content="bytes").open(storage)
    with pytest.raises(DataError, match=r"hurt\.array_record is not a whole"):
        source.__getitems__(range(2000))


@pytest.mark.parametrize(
    ("name", "kind"), [("x.parquet", Parquet), ("x.bagz", Bagz), ("x.jsonl.gz", Jsonl)]
)
def test_a_damaged_file_is_named(tmp_path: Path, storage: Storage, name: str, kind):
    (tmp_path / name).write_bytes(b"\x1f\x8b this is nothing of the kind" * 9)
    with pytest.raises(DataError, match=rf"{name} is not a whole"):
        kind(path=str(tmp_path / name)).open(storage)


@pytest.mark.parametrize("make", [make_parquet, make_hugging_face])
def test_a_missing_column_is_named(make, tmp_path: Path, storage: Storage):
    config = dataclasses.replace(make(tmp_path), columns=("body",))
    with pytest.raises(DataError, match=r"has no column 'body', it has (n, text|text, n)"):
        config.open(storage)


def test_text_that_is_not_utf8_is_named(tmp_path: Path, storage: Storage):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text \(byte 3 is 0xe9\)"):
        Text(path=str(tmp_path / "latin.txt")).open(storage)[0]


@pytest.mark.parametrize("kind", [Text, Jsonl, Parquet, ArrayRecord, Bagz])
def test_a_glob_without_files_is_named(tmp_path: Path, storage: Storage, kind):
    with pytest.raises(DataError, match=r"none-\* matches no file"):
        kind(path=str(tmp_path / "none-*")).open(storage)


def test_stdlib_leaves_out_tests_tables_and_what_is_not_utf8(tmp_path: Path, storage: Storage):
    keep = ["ast.py", "json/decoder.py", "email/mime/text.py"]
    leave = [
        "encodings/cp037.py",
        "pydoc_data/topics.py",
        "test/test_x.py",
        "json/tests/test_y.py",
        "site-packages/numpy/a.py",
        "html/entities.py",
        "__pycache__/z.py",
    ]
    for name in keep + leave:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import os\n")
    (tmp_path / "token.py").write_text('"""Tokens."""\n# Auto-generated by a tool\n')
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    source = Stdlib(root=tmp_path).open(storage)
    assert sorted(source[i]["path"] for i in range(len(source))) == sorted(keep)
    with pytest.raises(DataError, match="holds no Python source"):
        Stdlib(root=tmp_path / "pydoc_data" / "none").open(storage)


def test_this_pythons_library_is_several_megabytes_of_text(storage: Storage):
    source = Stdlib().open(storage)
    assert len(source) > 300
    assert sum(len(source[i]["text"]) for i in range(len(source))) > 5_000_000


class Squares:
    """A source as a user writes it."""

    def __init__(self, count: int, fail_at: int = -1):
        self.count = count
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        if index == self.fail_at:
            raise ValueError("no such square")
        return f"{index} squared is {index * index}"


def no_source() -> int:
    return 3


def test_a_python_source_is_found_by_import_path(storage: Storage, monkeypatch):
    monkeypatch.setitem(sys.modules, "user_sources", sys.modules[__name__])
    source = PythonSource(target="user_sources:Squares", arguments={"count": 4}).open(storage)
    assert len(source) == 4
    assert source.__getitems__([3, 1]) == [
        {"text": "3 squared is 9"},
        {"text": "1 squared is 1"},
    ]
    failing = PythonSource(target="user_sources:Squares", arguments={"count": 4, "fail_at": 2})
    with pytest.raises(DataError, match="record 2 failed: ValueError: no such square"):
        failing.open(storage).__getitems__([0, 1, 2])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_here:f", "no_such_module_here raises ModuleNotFoundError"),
        ("user_sources:nothing", "user_sources has no function nothing"),
        ("user_sources", "names no function"),
        ("user_sources:no_source", "is int without __len__ and __getitem__"),
        ("user_sources:Squares", "cannot be built"),
    ],
)
def test_a_wrong_target_is_named(storage: Storage, monkeypatch, target: str, message: str):
    monkeypatch.setitem(sys.modules, "user_sources", sys.modules[__name__])
    with pytest.raises(ConfigError, match=message):
        PythonSource(target=target).open(storage)
