"""TFDS datasets on disk in ArrayRecord format, decoded by features.json without TensorFlow."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.records import Record, decode
from fornax.data.sources.array_record import ArrayRecordFiles

_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


@functools.cache
def _example_class() -> Any:
    """The message class of tf.train.Example, declared here from its public wire format."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="fornax/example.proto", package="fornax.example", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for field_name, number, label, kind, of in fields:
            made.field.add(
                name=field_name, number=number, label=label, type=kind, type_name=of or None
            )
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    package = ".fornax.example."
    message("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    kinds = (
        ("bytes_list", 1, "BytesList"),
        ("float_list", 2, "FloatList"),
        ("int64_list", 3, "Int64List"),
    )
    feature = message(
        "Feature", *((n, i, one, field.TYPE_MESSAGE, package + of) for n, i, of in kinds)
    )
    feature.oneof_decl.add(name="kind")
    for member in feature.field:
        member.oneof_index = 0
    features = message(
        "Features", ("feature", 1, many, field.TYPE_MESSAGE, package + "Features.FeatureEntry")
    )
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=one, type=field.TYPE_MESSAGE, type_name=package + "Feature"
    )
    message("Example", ("features", 1, one, field.TYPE_MESSAGE, package + "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("fornax.example.Example"))


def _value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return []
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return list(values)
    return np.asarray(values, np.int64 if kind == "int64_list" else np.float32)


def _convert(value: Any, spec: dict[str, Any], where: str) -> Any:
    """A feature's list of values by its entry in features.json: text, scalars, tensors."""
    kind = str(spec.get("pythonClassName", "")).rsplit(".", 1)[-1]
    if len(value) == 1 and kind == "Text":
        return decode(value[0], where)
    if len(value) == 1 and kind in ("ClassLabel", "Scalar"):
        return value[0].item() if hasattr(value[0], "item") else value[0]
    if kind == "Tensor" and isinstance(value, np.ndarray):
        return _tensor(value, spec.get("tensor", {}), where)
    if len(value) == 1 and isinstance(value, list):
        return value[0]
    return value


def _tensor(value: np.ndarray, spec: dict[str, Any], where: str) -> Any:
    array = value.astype(spec.get("dtype", value.dtype))
    shape = [int(d) if int(d) > 0 else -1 for d in spec.get("shape", {}).get("dimensions", [])]
    if not shape:
        return array[0].item() if len(array) == 1 else array
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise DataError(f"{where}: {len(array)} values do not form the shape {shape}") from error


class TfdsSource:
    """Each example is one record, its features decoded."""

    def __init__(self, files: ArrayRecordFiles, features: dict[str, Any]):
        self._files = files
        self._features = features

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        data = self._files.read(indices)
        return [self._decode(item, i) for i, item in zip(indices, data, strict=True)]

    def _decode(self, data: bytes, index: int) -> Record:
        from google.protobuf.message import DecodeError

        where = self.locate(index)
        try:
            example = _example_class().FromString(data)
        except DecodeError as error:
            raise DataError(f"{where} is not a tf.Example ({error})") from error
        found = {name: _value(feature) for name, feature in example.features.feature.items()}
        return {
            name: _convert(value, self._features.get(name, {}), f"{where} feature {name!r}")
            for name, value in sorted(found.items())
        }

    def locate(self, index: int) -> str:
        return self._files.locate(index)

    def identity(self) -> str:
        return f"tfds|{self._files.identity()}"


@dataclass(frozen=True, kw_only=True)
class Tfds:
    """A TFDS dataset on disk, prepared with `file_format="array_record"`."""

    type: Literal["tfds"] = "tfds"
    path: str
    """The version folder, which holds features.json and dataset_info.json; gs:// and s3:// too."""
    split: str = "train"
    """The split to read."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("tfds: path is empty; name the dataset's version folder")

    def open(self, storage: Storage) -> TfdsSource:
        """Read the dataset's description; `DataError` when it is missing or of another format."""
        info = _read(storage, self.path, "dataset_info.json")
        features = _read(storage, self.path, "features.json")
        file_format = info.get("fileFormat", "tfrecord")
        if file_format != "array_record":
            raise DataError(
                f"{self.path} is stored as {file_format}: prepare it with "
                "file_format='array_record'"
            )
        splits = {split["name"]: split for split in info.get("splits", [])}
        if self.split not in splits:
            raise DataError(
                f"{self.path} has no split {self.split!r}, it has {', '.join(sorted(splits))}"
            )
        split = splits[self.split]
        counts = [int(count) for count in split.get("shardLengths", [])]
        template = split.get("filepathTemplate") or _TEMPLATE
        paths = [
            storage.join(self.path, _file_name(template, info["name"], self.split, i, len(counts)))
            for i in range(len(counts))
        ]
        specs = features.get("featuresDict", {}).get("features", {})
        return TfdsSource(ArrayRecordFiles(paths, storage, counts), specs)


def _file_name(template: str, dataset: str, split: str, shard: int, shards: int) -> str:
    return template.format(
        DATASET=dataset,
        SPLIT=split,
        FILEFORMAT="array_record",
        SHARD_INDEX=f"{shard:05d}",
        NUM_SHARDS=f"{shards:05d}",
        SHARD_X_OF_Y=f"{shard:05d}-of-{shards:05d}",
    )


def _read(storage: Storage, root: str, name: str) -> dict[str, Any]:
    address = storage.join(root, name)
    if not storage.exists(address):
        raise DataError(f"{root} has no {name}: name the version folder of a TFDS dataset")
    try:
        return json.loads(storage.local(address).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{address} is not valid JSON ({error})") from error
