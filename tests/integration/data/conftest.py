"""A small object store on 127.0.0.1 that speaks as much of GCS and S3 as reading needs."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from tests.integration.local_http import Handler, serving

BUCKET = "bucket"

# gcsfs asks a gRPC service what kind of bucket it reads; this store speaks HTTP only.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class ObjectStore:
    """Objects by key, and the requests that were made."""

    def __init__(self, objects: dict[str, bytes]):
        self.objects = objects
        self.requests: list[str] = []
        self.cut: set[str] = set()
        """Keys whose downloads end half way."""
        self.address = ""


@contextmanager
def serve(objects: dict[str, bytes]) -> Iterator[ObjectStore]:
    """A running store of `objects` in `BUCKET`."""
    store = ObjectStore(objects)

    with serving(type("Handler", (_Handler,), {"store": store})) as store.address:
        yield store


class _Handler(Handler):
    store: ObjectStore

    def answer(self, body: bytes) -> None:
        del body
        self.store.requests.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if "/storage/v1/b/" in url.path:
            self._gcs(url.path, query)
        else:
            self._s3(unquote(url.path), query)

    def _media(self, key: str) -> None:
        data = self.store.objects[key]
        total = len(data)
        code, headers = 200, {"ETag": f'"{_etag(data)}"'}
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) if last else total - 1, total - 1)
            data, code = data[start : end + 1], 206
            headers["Content_Range"] = f"bytes {start}-{end}/{total}"
        if key in self.store.cut and self.command == "GET":
            data = data[: len(data) // 2]
        self.send(code, data, "application/octet-stream", Accept_Ranges="bytes", **headers)

    def _names(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        keys, folders = [], set()
        for key in sorted(self.store.objects):
            if key.startswith(prefix):
                head, found, _ = key[len(prefix) :].partition(delimiter or "\0")
                if found:
                    folders.add(f"{prefix}{head}{delimiter}")
                else:
                    keys.append(key)
        return keys, sorted(folders)

    def _gcs(self, path: str, query: dict[str, str]) -> None:
        _, _, rest = path.partition(f"/storage/v1/b/{BUCKET}")
        key = unquote(rest.removeprefix("/o").removeprefix("/"))
        if rest in ("/o", "/o/"):
            keys, folders = self._names(query.get("prefix", ""), query.get("delimiter", ""))
            items = [self._gcs_item(name) for name in keys]
            self._json(200, {"kind": "storage#objects", "items": items, "prefixes": folders})
        elif not rest:
            self._json(200, {"kind": "storage#bucket", "name": BUCKET})
        elif key not in self.store.objects:
            self._json(404, {"error": {"code": 404, "message": f"No such object: {key}"}})
        elif query.get("alt") == "media":
            self._media(key)
        else:
            self._json(200, self._gcs_item(key))

    def _gcs_item(self, key: str) -> dict[str, str]:
        data = self.store.objects[key]
        return {
            "kind": "storage#object",
            "name": key,
            "bucket": BUCKET,
            "size": str(len(data)),
            "etag": _etag(data),
            "updated": "2026-01-01T00:00:00Z",
            "timeCreated": "2026-01-01T00:00:00Z",
            "mediaLink": f"{self.store.address}/storage/v1/b/{BUCKET}/o/{quote(key, '')}?alt=media",
        }

    def _json(self, code: int, content: object) -> None:
        self.send(code, json.dumps(content).encode(), "application/json")

    def _s3(self, path: str, query: dict[str, str]) -> None:
        key = path.removeprefix(f"/{BUCKET}").removeprefix("/")
        if not key:
            self._s3_list(query)
        elif key in self.store.objects:
            self._media(key)
        else:
            body = f"<Error><Code>NoSuchKey</Code><Key>{escape(key)}</Key></Error>"
            self.send(404, body.encode(), "application/xml")

    def _s3_list(self, query: dict[str, str]) -> None:
        prefix = query.get("prefix", "")
        keys, folders = self._names(prefix, query.get("delimiter", ""))
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{_etag(self.store.objects[key])}</ETag>"
            f"<Size>{len(self.store.objects[key])}</Size></Contents>"
            for key in keys
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in folders
        )
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}{common}"
            "</ListBucketResult>"
        )
        self.send(200, body.encode(), "application/xml")


@pytest.fixture(scope="session")
def serve_objects() -> Callable[[dict[str, bytes]], AbstractContextManager[ObjectStore]]:
    """`serve`, for tests that cannot import this file."""
    return serve


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
