"""Bundles made to do harm, in a process of their own: refused or read, and nothing read outside."""

import contextlib
import ctypes
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import manifest, weights

_NONBLOCK, _ACCESS, _OPEN = 0x800, 0x1, 0x20  # of Linux's inotify


class Watch:
    """What is opened or read in a folder, by whatever code of this process."""

    def __init__(self, folder: Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_NONBLOCK)
        libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _ACCESS | _OPEN)

    def events(self) -> bytes:
        """Since the last time; empty: nothing."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._descriptor, 4096)
        return b""


def seal(root: Path, change: Callable[[dict], Any] = lambda body: None) -> None:
    """Make hashes, sizes and seal right, as one who means harm would."""
    body = json.loads((root / "manifest.json").read_text())
    body["files"] = {
        str(path.relative_to(root)): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    change(body)
    body["seal"] = manifest.seal(body)
    (root / "manifest.json").write_text(json.dumps(body))


def files_of(root: Path, below: str = "") -> list[Path]:
    """The files of a bundle in order."""
    return sorted(path for path in (root / below).rglob("*") if path.is_file())


@contextlib.contextmanager
def copied(source: Path, work: Path) -> Iterator[Path]:
    """A copy of the bundle to damage."""
    root = work / "hostile"
    shutil.copytree(source, root)
    try:
        yield root
    finally:
        shutil.rmtree(root)


def refused(root: Path, action: Callable[[Path], Any] = export.load) -> None:
    """That a bundle is refused with a paragraph."""
    with pytest.raises(BundleError) as error:
        action(root)
    assert str(error.value).encode()


def flipped(source: Path, work: Path) -> None:
    """One bit of any file, or its end, under the hashes that were: never accepted."""
    with copied(source, work) as root:
        for seed in range(60):
            pick = random.Random(seed)
            file = pick.choice(files_of(root))
            good = file.read_bytes()
            data = bytearray(good)
            data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
            cut = [data, data[: pick.randrange(len(data))], data + b"\0"]
            file.write_bytes(pick.choice(cut) if seed % 3 == 0 else data)
            refused(root, export.open_bundle)
            file.write_bytes(good)
        export.open_bundle(root)


def _places(at: Any) -> Iterator[tuple[Any, Any]]:
    keys = at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
    for key in keys:
        yield at, key
        yield from _places(at[key])


def _mutate(data: st.DataObject, body: dict) -> None:
    """Drop, repeat, exchange or replace something at any depth."""
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_places(body))
        parent, key = data.draw(st.sampled_from(places))
        other, there = data.draw(st.sampled_from(places))
        kind = data.draw(st.sampled_from(["drop", "repeat", "exchange", "copy", "number", "text"]))
        value = json.loads(json.dumps(other[there]))
        if kind == "drop":
            del parent[key]
        elif kind == "repeat" and isinstance(parent, list):
            parent.insert(key, value)
        elif kind == "exchange":
            parent[key] = value
        elif kind == "number":
            parent[key] = data.draw(st.sampled_from([0, -1, 1, 7, 2**31, 2**63, 1e308, 0.5]))
        elif kind == "text":
            parent[key] = data.draw(st.sampled_from(["b", "t", "", "../x", "b*b", "a" * 300]))
        else:
            parent[str(key) if isinstance(parent, dict) else key] = [value, value]


def manifests(source: Path, work: Path) -> None:
    """A manifest of another structure under a right seal: refused, or the bundle loads."""
    whole = json.loads((source / "manifest.json").read_text())

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        body = json.loads(json.dumps(whole))
        _mutate(data, body)
        body["seal"] = manifest.seal(body)
        (root / "manifest.json").write_text(json.dumps(body))
        with contextlib.suppress(BundleError):
            export.load(root)

    with copied(source, work) as root:
        check()


def _tensors(header: Any, body: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def golden(source: Path, work: Path) -> None:
    """Golden files that lie about their tensors: names, types, shapes, offsets, lengths."""
    file = "golden/predict.safetensors"
    good = (source / file).read_bytes()
    size = int.from_bytes(good[:8], "little")
    header, tail = json.loads(good[8 : 8 + size]), good[8 + size :]
    name = next(iter(header))
    entry = header[name]
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    lies = [
        {"shape": [*shape, 2**62]},
        {"shape": [2**32] * 2},
        {"shape": [-1, -4]},
        {"shape": [1.0]},
        {"shape": [True] * len(shape)},
        {"shape": "4"},
        {"shape": [1] * 100},
        {"shape": list(reversed(shape)) if len(set(shape)) > 1 else [0]},
        {"data_offsets": [stop, start]},
        {"data_offsets": [-8, stop - start - 8]},
        {"data_offsets": [start, stop, stop]},
        {"data_offsets": [2**63, 2**63 + stop - start]},
        {"data_offsets": None},
        {"dtype": "F64"},
        {"dtype": "F8_E4M3"},
        {"dtype": ["F32"]},
        {"dtype": "object"},
    ]
    files = [_tensors(header | {name: entry | lie}, tail) for lie in lies]
    files += [_tensors({k: v for k, v in header.items() if k != name}, tail)]
    files += [_tensors(header | {name: each}, tail) for each in ([], "x", 5, None, {})]
    files += [_tensors(each, tail) for each in (b"[" * 100_000, b"", b"{}", b"[]", b"\xff", b"1")]
    files += [b"", b"\0" * 8, b"\xff" * 8, good[:7], good[:-1], (2**63).to_bytes(8, "little")]
    with copied(source, work) as root:
        for data in files:
            (root / file).write_bytes(data)
            seal(root)
            refused(root, lambda root: export.open_bundle(root).golden("predict"))


def pages(source: Path, work: Path) -> None:
    """Pages of the weights' database exchanged, emptied, or of another database."""
    other = work / "other"
    arrays = {"w": np.ones((3, 3), np.float32)}
    weights.write(other, arrays, {"w": weights.describe(arrays["w"], None)})
    with copied(source, work) as root:
        mine, theirs = files_of(root, "weights"), files_of(other)
        good = {path: path.read_bytes() for path in mine}
        for seed in range(24):
            pick = random.Random(seed)
            for path, data in good.items():
                path.write_bytes(data)
            at = pick.choice(mine)
            kept = good[at]
            choices = [b"", kept[: len(kept) // 2], kept[::-1], bytes(len(kept)), kept * 2]
            choices += [path.read_bytes() for path in theirs]
            choices += [good[path] for path in mine if path != at]
            at.write_bytes(pick.choice(choices))
            seal(root)
            with contextlib.suppress(BundleError):
                export.load(root)


def outside(source: Path, work: Path) -> None:
    """A database whose pages point out of the bundle, to where there are pages indeed."""
    with copied(source, work) as root:
        described = json.loads((root / "manifest.json").read_text())["weights"]
        found = export.open_bundle(root).load_weights().params
        shutil.rmtree(root / "weights")
        for each in described:
            prefixes = ("value_data", "btree_node_data", "version_tree_node_data")
            store = {"driver": "file", "path": f"{root / 'weights'}/"}
            kvstore: dict[str, Any] = {"driver": "ocdbt", "base": store, "path": f"{each['name']}/"}
            kvstore |= {f"{prefix}_prefix": "elevenchars/" for prefix in prefixes}
            kvstore["config"] = {"max_inline_value_bytes": 0, "compression": None}
            spec = {"driver": "zarr", "kvstore": kvstore, "dtype": each["stored"]}
            metadata = {"shape": each["shape"], "chunks": each["chunks"], "compressor": None}
            opened = ts.open({**spec, "metadata": metadata}, create=True).result()
            opened.write(np.asarray(found[each["name"]])).result()
        seal(root)
        export.load(root)  # as it stands it is a bundle like others
        far = work / "pages"
        far.mkdir()
        away = os.fsencode("../../pages/")
        for path in (root / "weights" / "elevenchars").iterdir():
            shutil.move(path, far / path.name)
        (root / "weights" / "elevenchars").rmdir()
        for path in (root / "weights" / "manifest.ocdbt", *far.iterdir()):
            path.write_bytes(_redirected(path.read_bytes(), b"elevenchars/", away))
        seal(root)
        watch = Watch(far)
        with pytest.raises(BundleError, match="Invalid key"):
            export.load(root)
        assert not watch.events(), "pages outside of the bundle were read"


def _redirected(data: bytes, name: bytes, other: bytes) -> bytes:
    """A page whose files lie elsewhere under names as long, with its CRC-32C made right."""
    assert len(name) == len(other)
    if name not in data:
        return data
    data, crc = data[:-4].replace(name, other), 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return data + (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def nodes(source: Path, work: Path) -> None:
    """Files that are links, pipes, sockets or devices, and names that no bundle has."""
    secret = work / "outside"
    secret.mkdir()
    (secret / "secret").write_bytes(b"secret")
    watch = Watch(secret)

    def bound(path: Path) -> None:
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)

    def device(path: Path) -> None:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero

    makers: list[Callable[[Path], Any]] = [
        lambda path: path.symlink_to(secret / "secret"),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/proc/self/environ"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to(secret),
        os.mkfifo,
        bound,
        device,
        Path.mkdir,
    ]
    for number in range(len(files_of(source))):
        for make in makers:
            with copied(source, work) as root:
                path = files_of(root)[number]
                path.unlink()
                try:
                    make(path)
                except PermissionError:
                    continue
                refused(root)
                refused(root, lambda root: export.open_bundle(root, verify=False))
    for name in ("a" * 255, "é" * 100, " ", "\n", "...", "-rf", "%2e%2e"):
        with copied(source, work) as root:
            (root / name).write_bytes(b"")
            refused(root)
            seal(root, lambda body, name=name: body["files"].setdefault(name, None))
            if name != "a" * 255:
                refused(root)
    with copied(source, work) as root:
        deep = root / "weights" / "/".join("d" * 300)
        deep.mkdir(parents=True)
        refused(root)
    assert not watch.events(), "a file outside of the bundle was read"


KINDS = {f.__name__: f for f in (flipped, manifests, golden, pages, outside, nodes)}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["flipped golden nodes", "manifests pages outside"])
def test_a_hostile_bundle_is_refused_and_never_ends_the_process(sealed, tmp_path, kinds):
    command = [sys.executable, __file__, str(sealed), str(tmp_path), *kinds.split()]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        command, env=where, capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]


if __name__ == "__main__":
    for each in sys.argv[3:]:
        KINDS[each](Path(sys.argv[1]), Path(sys.argv[2]))
