"""Where images or videos with captions lie: a folder, Parquet files, WebDataset's tar files.

Each store says how many examples it has, their captions, and gives one's bytes by number; nothing
is decoded here. Numbers are in the order of sorted names, so they are the same on every host.
"""

import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fornax.config.errors import ConfigError, DataError
from fornax.config.suggest import first_few
from fornax.diffusion.data.config import ImagesConfig
from fornax.diffusion.data.videos import VIDEO_ENDINGS

__all__ = ["ENDINGS", "Store", "open_store"]

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm")
"""Files that are images, by the end of their names in lower case."""

_OTHERS = (".avif", ".heic", ".heif", ".jxl", ".avi", ".flv", ".mpeg", ".mpg", ".wmv")
"""Images and videos that are not read."""


def _endings(config: ImagesConfig) -> tuple[str, ...]:
    """Of the files that are examples."""
    return (*ENDINGS, *VIDEO_ENDINGS) if config.frames else ENDINGS


class Store(Protocol):
    """Encoded images or videos by number."""

    @property
    def captions(self) -> Sequence[str | None]:
        """None where there is no caption."""
        ...

    def read(self, index: int) -> bytes:
        """The file of an image. OSError where it cannot be read."""
        ...

    def where(self, index: int) -> str:
        """The image's place, for messages."""
        ...


def open_store(config: ImagesConfig) -> Store:
    """Find out what lies at `config.path`, and list it.

    Raises:
      ConfigError: no path, or nothing there.
      DataError: nothing that is an image, or captions that cannot be read.
    """
    if not config.path:
        raise ConfigError(
            "data.path is empty; name a folder of images, Parquet files or tar files with --data, "
            "or train on letters with --data.type letters"
        )
    path = Path(config.path).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data.path={config.path} does not exist (from {Path.cwd()}); name a folder of images, "
            "Parquet files or tar files"
        )
    files = [path] if path.is_file() else _listed(path)
    kinds: tuple[tuple[tuple[str, ...], Callable[..., Store]], ...] = (
        ((".parquet",), _Parquet),
        ((".tar",), _Tars),
        (_endings(config), _Folder),
    )
    for endings, store in kinds:
        found = [file for file in files if file.name.lower().endswith(endings)]
        if found:
            if store is _Folder:
                _check_unread(files, config)
            return store(found, path, config)
    packed = next((f for f in files if f.name.endswith((".tar.gz", ".tgz", ".tar.zst"))), None)
    if packed is not None:
        raise DataError(
            f"{packed} is compressed, and images are read at their place in a tar file; unpack it "
            "to a plain .tar (images are compressed already)"
        )
    if any(file.name.lower().endswith(VIDEO_ENDINGS) for file in files):
        raise DataError(
            f"{path} holds videos and no images; set data.frames to how many are an example, such "
            "as 17"
        )
    raise DataError(
        f"{path} holds no image ({', '.join(_endings(config))}), .parquet or .tar file; name "
        "another folder"
    )


def _check_unread(files: Sequence[Path], config: ImagesConfig) -> None:
    """Refuse images and videos that would be passed over beside those that are read.

    Raises:
      DataError: with the first of them.
    """
    videos = () if config.frames else VIDEO_ENDINGS
    unread = [str(file) for file in files if file.name.lower().endswith((*_OTHERS, *videos))]
    if unread:
        more = "" if config.frames else ", set data.frames for videos"
        raise DataError(
            f"{len(unread)} files beside the images would not be read: {first_few(unread)}; "
            f"convert them to {', '.join(_endings(config))}{more}, or move them away"
        )


def _listed(folder: Path) -> list[Path]:
    return [
        Path(top) / name
        for top, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if not name.startswith(".")
    ]


class _Folder:
    """Files, with a text beside each or one `metadata.jsonl` for a folder."""

    def __init__(self, files: Sequence[Path], root: Path, config: ImagesConfig):
        self._files, self._root = files, root
        tables: dict[Path, Mapping[str, str]] = {}
        self.captions = [self._caption(file, tables, config) for file in files]

    def _caption(
        self, file: Path, tables: dict[Path, Mapping[str, str]], config: ImagesConfig
    ) -> str | None:
        if config.prompt is not None:
            return config.prompt
        beside = file.with_suffix(".txt")
        if beside.is_file():
            return _read_text(beside).strip()
        for folder in (file.parent, self._root):
            if folder.is_dir() and folder not in tables:
                tables[folder] = _metadata(folder, config.caption)
            table = tables.get(folder, {})
            if folder in file.parents:
                found = table.get(file.relative_to(folder).as_posix())
                if found is not None:
                    return found
        return None

    def read(self, index: int) -> bytes:
        return self._files[index].read_bytes()

    def where(self, index: int) -> str:
        return str(self._files[index])


def _metadata(folder: Path, key: str) -> dict[str, str]:
    """File name to caption, of a folder's `metadata.jsonl`."""
    path = folder / "metadata.jsonl"
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(_read_text(path).split("\n"), 1):  # U+2028 ends no line of JSON
        if not line.strip():
            continue
        record = _object(line, f"{path}:{number}")
        name, caption = record.get("file_name"), record.get(key)
        if not isinstance(name, str):
            raise DataError(f"{path}:{number} has no file_name; name the image that it is of")
        if caption is not None:
            found[name] = _text(caption, key, f"{path}:{number}")
    return found


def _read_text(path: Path) -> str:
    """A file's text, without the byte order mark that some editors write."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as UTF-8 text: {error}; save it as UTF-8"
        ) from error


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{where} is not JSON: {error}; it may be truncated: write it again"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object, such as {{'file_name': ..., 'text': ...}}")
    return value


def _text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key} is {value!r:.60}, and a caption is text; name another with "
            "data.caption"
        )
    return value.strip()


class _Parquet:
    """Rows with a column of images and one of captions, read by row groups."""

    def __init__(self, files: Sequence[Path], root: Path, config: ImagesConfig):
        import pyarrow
        import pyarrow.parquet as parquet

        self._config = config
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, its first row
        self._held: tuple[int, list[bytes]] | None = None
        self._starts: list[int] = []
        self.captions: list[str | None] = []
        for file in files:
            try:
                table = parquet.ParquetFile(file)
                names = table.schema_arrow.names
                columns = (
                    [config.image] if config.prompt is not None else [config.image, config.caption]
                )
                missing = [name for name in columns if name not in names]
                if missing:
                    raise DataError(
                        f"{file} has no column {missing[0]!r}; it has {', '.join(names)}: name it "
                        f"with data.{'image' if missing[0] == config.image else 'caption'}"
                    )
                for group in range(table.num_row_groups):
                    self._starts.append(len(self.captions))
                    self._groups.append((file, group, len(self.captions)))
                    self.captions += self._captions(table, file, group)
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(
                    f"{file} cannot be read as Parquet: {str(error).rstrip('.')}; copy it again"
                ) from error
        if not self.captions:
            raise DataError(f"{root} has no row; name files with some")

    def _captions(self, table: Any, file: Path, group: int) -> list[str | None]:
        if self._config.prompt is not None:
            return [self._config.prompt] * table.metadata.row_group(group).num_rows
        column = table.read_row_group(group, [self._config.caption]).column(0).to_pylist()
        key = self._config.caption
        return [
            None if v is None else _text(v, key, f"{file} row {i}") for i, v in enumerate(column)
        ]

    def read(self, index: int) -> bytes:
        import bisect

        import pyarrow.parquet as parquet

        number = bisect.bisect_right(self._starts, index) - 1
        file, group, first = self._groups[number]
        held = self._held
        if held is None or held[0] != number:
            column = parquet.ParquetFile(file).read_row_group(group, [self._config.image]).column(0)
            held = self._held = (number, [_encoded(value) for value in column.to_pylist()])
        return held[1][index - first]

    def where(self, index: int) -> str:
        import bisect

        file, group, first = self._groups[bisect.bisect_right(self._starts, index) - 1]
        return f"{file} row group {group} row {index - first}"


def _encoded(value: object) -> bytes:
    """The bytes of a cell; none where it has none, which then is not an image."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
    return value if isinstance(value, bytes) else b""


class _Tars:
    """Members of one base name are one example: `0001.jpg` with `0001.txt` or `0001.json`."""

    def __init__(self, files: Sequence[Path], root: Path, config: ImagesConfig):
        self._members: list[tuple[Path, str, int, int]] = []  # file, name, offset, size
        self.captions: list[str | None] = []
        for file in files:
            self._add(file, config)
        if not self._members:
            raise DataError(
                f"{root} has no image ({', '.join(_endings(config))}); name tar files with some"
            )

    def _add(self, file: Path, config: ImagesConfig) -> None:
        examples: dict[str, dict[str, tarfile.TarInfo]] = {}
        try:
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if member.isfile():
                        folder, _, name = member.name.rpartition("/")
                        base, _, ending = name.partition(".")
                        examples.setdefault(f"{folder}/{base}", {})[f".{ending.lower()}"] = member
        except (tarfile.TarError, OSError) as error:
            raise DataError(
                f"{file} cannot be read as a tar file: {error}; it may be truncated: copy it again"
            ) from error
        size = file.stat().st_size
        for parts in examples.values():
            image = next((parts[e] for e in parts if e in _endings(config)), None)
            if image is None:
                continue
            if image.offset_data + image.size > size:
                raise DataError(f"{file} ends within {image.name}: it is truncated; copy it again")
            self._members.append((file, image.name, image.offset_data, image.size))
            self.captions.append(self._caption(file, parts, config))

    def _caption(
        self, file: Path, parts: Mapping[str, tarfile.TarInfo], config: ImagesConfig
    ) -> str | None:
        if config.prompt is not None:
            return config.prompt
        if text := parts.get(".txt"):
            where = f"{file}:{text.name}"
            try:
                return _at(file, text.offset_data, text.size).decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8 text: {error}; save it as UTF-8") from error
        if record := parts.get(".json"):
            where = f"{file}:{record.name}"
            value = _object(_at(file, record.offset_data, record.size), where).get(config.caption)
            return None if value is None else _text(value, config.caption, where)
        return None

    def read(self, index: int) -> bytes:
        file, _, offset, size = self._members[index]
        return _at(file, offset, size)

    def where(self, index: int) -> str:
        file, name, _, _ = self._members[index]
        return f"{file}:{name}"


def _at(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as opened:
        return os.pread(opened.fileno(), size, offset)
