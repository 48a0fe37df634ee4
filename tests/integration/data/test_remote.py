"""gs:// and s3:// through fsspec's own clients, against a store on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fornax.config.errors import DataError
from fornax.data import (
    BuildConfig,
    DataConfig,
    Dataset,
    Jsonl,
    Text,
    TrainBpe,
    build,
    open_batches,
    read_texts,
)
from fornax.data.files import Storage

BUCKET = "bucket"
TEXTS = [f"object {i}: " + "remote words " * (i + 1) for i in range(12)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remote")
    (root / "d.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    source = Jsonl(path=str(root / "d.jsonl"))
    tokenizer = TrainBpe(vocab_size=270)
    build(BuildConfig(source=source, output=root / "built", tokenizer=tokenizer, holdout=0.0))
    return root


@pytest.fixture(scope="module")
def store(dataset: Path, serve_objects) -> Iterator[Any]:
    objects = {f"texts/{i}.txt": text.encode() for i, text in enumerate(TEXTS)}
    for path in dataset.rglob("*"):
        if path.is_file():
            objects[path.relative_to(dataset).as_posix()] = path.read_bytes()
    with serve_objects(objects) as running:
        yield running


def options_of(protocol: str, store: Any) -> dict[str, str]:
    if protocol == "gs":
        return {"endpoint_url": store.address, "token": "anon"}
    return {"endpoint_url": store.address, "key": "key", "secret": "secret"}


@pytest.fixture(params=["gs", "s3"])
def remote(request, store: Any, tmp_path: Path) -> tuple[str, Storage]:
    storage = Storage(tmp_path / "cache", options_of(request.param, store))
    return f"{request.param}://{BUCKET}", storage


def test_globs_folders_and_files_are_found(remote: tuple[str, Storage]):
    root, storage = remote
    assert len(storage.expand(f"{root}/texts/*.txt")) == len(TEXTS)
    assert len(storage.expand(f"{root}/texts")) == len(TEXTS)
    source = Text(path=f"{root}/texts/1*.txt").open(storage)
    assert sorted(source[i]["text"] for i in range(len(source))) == sorted(
        TEXTS[i] for i in (1, 10, 11)
    )
    with pytest.raises(DataError, match=r"none-\*\.txt matches no file"):
        storage.expand(f"{root}/none-*.txt")


def test_an_object_is_fetched_once(remote: tuple[str, Storage], store: Any):
    root, storage = remote
    first = storage.local(f"{root}/d.jsonl")
    before = len(store.requests)
    assert storage.local(f"{root}/d.jsonl") == first
    fetched = [r for r in store.requests[before:] if r.startswith("GET") and "list-type" not in r]
    assert not [r for r in fetched if "alt=media" in r or r.startswith(f"GET /{BUCKET}/d.jsonl")]
    source = Jsonl(path=f"{root}/d.jsonl").open(storage)
    assert [source[i]["text"] for i in range(len(source))] == TEXTS


def test_a_missing_object_is_named(remote: tuple[str, Storage]):
    root, storage = remote
    with pytest.raises(DataError, match=r"none\.txt does not exist"):
        storage.local(f"{root}/none.txt")


def test_a_download_cut_short_is_named(remote: tuple[str, Storage], store: Any):
    root, storage = remote
    store.cut.add("texts/9.txt")
    try:
        with pytest.raises(DataError, match=r"texts/9\.txt (ended after|cannot be fetched)"):
            storage.local(f"{root}/texts/9.txt")
    finally:
        store.cut.clear()
    assert storage.local(f"{root}/texts/9.txt").read_text() == TEXTS[9]


@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_a_remote_dataset_gives_the_batches_of_the_local_one(
    protocol: str, store: Any, dataset: Path, tmp_path: Path
):
    local = DataConfig(source=Dataset(path=str(dataset / "built")), virtual_shards=2)
    remote = DataConfig(
        source=Dataset(path=f"{protocol}://{BUCKET}/built"),
        virtual_shards=2,
        cache_dir=tmp_path,
        storage_options=options_of(protocol, store),
    )
    with (
        open_batches(local, batch_size=2, seq_len=32) as ours,
        open_batches(remote, batch_size=2, seq_len=32) as theirs,
    ):
        for _ in range(5):
            np.testing.assert_array_equal(next(ours)["tokens"], next(theirs)["tokens"])
    storage = Storage(tmp_path, options_of(protocol, store))
    assert list(read_texts(f"{protocol}://{BUCKET}/built", "train", storage)) == TEXTS


def test_an_unknown_protocol_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nope:// is not a known protocol"):
        Storage(tmp_path).expand("nope://bucket/x")
