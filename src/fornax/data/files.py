"""Paths of data: globs, local files, and gs:// or s3:// objects fetched once into a local cache."""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import fsspec

from fornax.config import environment
from fornax.config.errors import DataError
from fornax.config.hub import find_dataset
from fornax.data.cache import FileCache

CACHE_GIB = 100.0
"""GiB of remote files that are kept, where nothing else is said."""

# The package that fsspec needs for a protocol, and the extra of ours that installs it.
_EXTRAS = {
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
}


def is_remote(path: str | Path) -> bool:
    """Whether `path` names an object behind a protocol such as gs:// rather than a local file."""
    return "://" in str(path) and not str(path).startswith("file://")


@functools.lru_cache(maxsize=32)
def _filesystem(protocol: str, options: tuple[tuple[str, str], ...]) -> Any:
    try:
        return fsspec.filesystem(protocol, **dict(options))
    except ImportError as error:
        package, extra = _EXTRAS.get(protocol, (protocol, ""))
        hint = f"pip install 'fornax-ai[{extra}]'" if extra else f"install {package}"
        raise DataError(f"{protocol}:// paths need the package {package}: {hint}") from error
    except ValueError as error:
        raise DataError(
            f"{protocol}:// is not a known protocol: use a local path, gs://, s3://"
        ) from error


class Storage:
    """Opens files by path or address; remote ones are copied once into a cache.

    Args:
      cache_dir: the folder of the cache; None: data/ in Fornax's own (`FORNAX_CACHE_DIR`).
      options: for the fsspec filesystem of a remote protocol, for example `endpoint_url`.
      cache_gib: GiB that the cache may hold; None: without a limit.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        options: dict[str, str] | None = None,
        cache_gib: float | None = CACHE_GIB,
    ):
        root = Path(cache_dir or environment.cache_dir() / "data").expanduser().absolute()
        self.cache = FileCache(root, None if cache_gib is None else int(cache_gib * 2**30))
        self.options = tuple(sorted((options or {}).items()))

    def filesystem(self, path: str) -> Any:
        """The fsspec filesystem of a remote path."""
        return _filesystem(path.split("://", 1)[0], self.options)

    def expand(
        self, patterns: str | Path | Sequence[str | Path], kinds: Sequence[str] = ()
    ) -> list[str]:
        """All files that `patterns` (paths, folders' files, or globs) name, sorted, each once.

        A pattern that matches nothing may be the name of a dataset on the Hub, of which the files
        of `kinds`, such as `*.parquet`, are meant.
        """
        if isinstance(patterns, str | Path):
            patterns = (patterns,)
        found: set[str] = set()
        for pattern in patterns:
            matches = self._matches(str(pattern))
            if not matches and kinds:
                matches = find_dataset(pattern, kinds) or []
            if not matches:
                raise DataError(f"{pattern} matches no file: check the path or the glob")
            found.update(matches)
        return sorted(found)

    def _matches(self, pattern: str) -> list[str]:
        if is_remote(pattern):
            return self._remote_matches(pattern)
        path = Path(pattern.removeprefix("file://")).expanduser()
        if path.is_file():
            return [str(path)]
        if path.is_dir():
            return _visible(str(p) for p in path.rglob("*") if p.is_file())
        return _visible(str(p) for p in _local_glob(path) if p.is_file())

    def _remote_matches(self, pattern: str) -> list[str]:
        filesystem = self.filesystem(pattern)
        protocol = pattern.split("://", 1)[0]
        try:
            if any(mark in pattern for mark in "*?["):
                names = filesystem.glob(pattern)
            elif filesystem.isfile(pattern):
                names = [pattern]
            else:
                names = filesystem.find(pattern)
        except (OSError, ValueError) as error:
            raise DataError(f"{pattern} cannot be listed: {error}") from error
        return [name if "://" in name else f"{protocol}://{name}" for name in names]

    def exists(self, path: str | Path) -> bool:
        """Whether a file is there."""
        if is_remote(path):
            return bool(self.filesystem(str(path)).exists(str(path)))
        return Path(path).exists()

    def local(self, path: str | Path) -> Path:
        """A local file with the contents of `path`, fetched into the cache when remote.

        Raises `DataError` when there is no such file.
        """
        text = str(path)
        if not is_remote(text):
            local = Path(text.removeprefix("file://"))
            if not local.is_file():
                raise DataError(f"{local} is not a file: check the path")
            return local
        return self._fetch(text)

    def _fetch(self, address: str) -> Path:
        filesystem = self.filesystem(address)
        try:
            info = filesystem.info(address)
        except FileNotFoundError as error:
            raise DataError(f"{address} does not exist: check the address") from error
        except OSError as error:
            raise DataError(f"{address} cannot be read: {error}") from error
        version = [
            str(info.get(key)) for key in ("size", "etag", "ETag", "md5Hash", "mtime", "blob_id")
        ]
        key = hashlib.sha256("\n".join([address, *version]).encode()).hexdigest()[:24]

        def fetch(partial: Path) -> None:
            filesystem.get_file(address, str(partial))
            size = partial.stat().st_size
            if size != info["size"]:
                raise DataError(f"{address} ended after {size} of {info['size']} bytes: try again")

        try:
            return self.cache.get(key, address.rsplit("/", 1)[-1], info["size"], fetch)
        except OSError as error:
            raise DataError(f"{address} cannot be fetched: {error}") from error

    def join(self, root: str | Path, name: str) -> str:
        """`name` inside the folder `root`, for local and remote roots alike."""
        return f"{str(root).rstrip('/')}/{name}"


def _local_glob(path: Path) -> Iterable[Path]:
    anchor = Path(path.anchor or ".")
    pattern = str(path.relative_to(anchor) if path.anchor else path)
    return anchor.glob(pattern) if pattern not in ("", ".") else []


def _visible(names: Iterable[str]) -> list[str]:
    return [name for name in names if not Path(name).name.startswith(".")]
