"""A header is read as it is written, and a wrong one is one error that names the file."""

import contextlib
import functools
import struct
import tempfile
import tracemalloc
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.gguf.files import TINY, key, text, tiny_tensors, tiny_tokenizer, write, write_tiny

from fornax.config.errors import CheckpointError, FornaxError
from fornax.data import load_tokenizer
from fornax.gguf import dequantize, is_gguf, open_gguf
from fornax.models import config_from_hf, read_config
from fornax.models.families.gguf import gguf_tensors


def test_metadata_of_every_type_and_tensors(tmp_path: Path) -> None:
    """Both versions have the same layout; alignment is the file's own."""
    scalars = {
        0: ("B", 200), 1: ("b", -3), 2: ("<H", 60_000), 3: ("<h", -5), 4: ("<I", 2**31),
        5: ("<i", -7), 6: ("<f", 0.5), 10: ("<Q", 2**40), 11: ("<q", -(2**40)), 12: ("<d", 1e300),
    }  # fmt: skip
    entries = [
        text(f"k{code}") + struct.pack("<I", code) + struct.pack(form, number)
        for code, (form, number) in scalars.items()
    ]
    entries += [
        key("yes", True),
        key("words", ["", "größe"]),
        key("numbers", np.array([1, -2], np.int32)),
        key("flags", np.array([True, False])),
        key("general.alignment", 64),
    ]
    tensors = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(-32, 32, dtype=np.int8).reshape(2, 32),
        "c": np.ones(5, np.float16),
    }
    for version in (2, 3):
        path = write(tmp_path / f"{version}.gguf", entries, tensors, version=version, alignment=64)
        file = open_gguf(path)
        assert {code: file.metadata[f"k{code}"] for code in scalars} == {
            code: number for code, (_, number) in scalars.items()
        }
        assert file.metadata["yes"] is True
        assert file.metadata["words"] == ["", "größe"]
        np.testing.assert_array_equal(file.metadata["numbers"], [1, -2])
        np.testing.assert_array_equal(file.metadata["flags"], [True, False])
        read = {
            name: dequantize(file.raw(tensor), tensor.type).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }
        np.testing.assert_array_equal(read["a"], tensors["a"])
        np.testing.assert_array_equal(read["b"], tensors["b"] * 0.5)
        np.testing.assert_array_equal(read["c"], tensors["c"])


def _start(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def _entry(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


_PAD = bytes(4096)
WRONG = {
    "is not a GGUF file": b"GGUF\3",
    "no GGUF file does": b"PK\3\4" + _PAD,
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + _PAD,
    "version 1": _start(0, 0, 1) + _PAD,
    "says that it has 1099511627776 tensors": _start(2**40, 0) + _PAD,
    "says that it has 70000 keys": _start(0, 70_000) + bytes(2**20),
    "the name of key 0 is 72057594037927936 bytes": _start(0, 1) + struct.pack("<Q", 2**56) + _PAD,
    "the name of key 0 takes 8000 bytes": _start(0, 1) + struct.pack("<Q", 8000) + _PAD,
    "is not UTF-8": _start(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + _PAD,
    "the key 'a' twice": _start(0, 2) + key("a", 1) * 2 + _PAD,
    "'a' is of type 77": _start(0, 1) + text("a") + struct.pack("<I", 77) + _PAD,
    "'a' is a truth value": _start(0, 1) + text("a") + struct.pack("<IB", 7, 2) + _PAD,
    "numbers in 'a'": _start(0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**20) + _PAD,
    "texts in 'a'": _start(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 2**20) + _PAD,
    "array of type 9": _start(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + _PAD,
    "alignment=24": _start(0, 1) + key("general.alignment", 24) + _PAD,
    "3 parts": _start(0, 1) + key("split.count", 3) + _PAD,
    "'w' has 9 axes": _start(1, 0) + _entry("w", (1,) * 9, 0, 0) + _PAD,
    "'w' has shape": _start(1, 0) + _entry("w", (2**40, 2**40), 0, 0) + _PAD,
    "has shape [0]": _start(1, 0) + _entry("w", (0,), 0, 0) + _PAD,
    "blocks of 32": _start(1, 0) + _entry("w", (33, 2), 8, 0) + _PAD,
    "w (IQ3_S), v (99)": _start(2, 0)
    + _entry("w", (256,), 21, 0)
    + _entry("v", (1,), 99, 0)
    + _PAD,
    "'w' lies at 4": _start(1, 0) + _entry("w", (4,), 0, 4) + _PAD,
    "'w' and 'v' overlap": _start(2, 0)
    + _entry("w", (16,), 0, 0)
    + _entry("v", (4,), 0, 32)
    + _PAD,
    "the tensor 'w' twice": _start(2, 0)
    + _entry("w", (4,), 0, 0)
    + _entry("w", (4,), 0, 32)
    + _PAD,
    "'w' ends at byte": _start(1, 0) + _entry("w", (4096,), 0, 0) + _PAD,
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_header_is_named(said: str, tmp_path: Path) -> None:
    """The message has the file and the field."""
    path = tmp_path / "wrong.gguf"
    path.write_bytes(WRONG[said])
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_files_of_that_name(tmp_path: Path) -> None:
    """A directory that is called so is none, and what is gone is an error of ours."""
    (tmp_path / "a.gguf").mkdir()
    assert not is_gguf(tmp_path / "a.gguf")
    assert not is_gguf(tmp_path / "none.gguf")
    assert is_gguf(write_tiny(tmp_path / "b.GGUF"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_gguf(tmp_path / "none.gguf")


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"k": 1}, {})
    with path.open("ab") as file:
        file.write(_PAD)
    assert open_gguf(path).metadata["k"] == 1
    write(path, {"k": 22, "more": "x" * 50}, {})
    assert open_gguf(path).metadata["k"] == 22


def _use(path: Path) -> None:
    """All that is read of a file but the numbers of its matrices."""
    file = open_gguf(path)
    config_from_hf(read_config(path))
    gguf_tensors(file)
    load_tokenizer(path)


@functools.cache
def _whole() -> bytes:
    """A header of 6,500 bytes, then few numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "whole.gguf", {**TINY, **tiny_tokenizer()}, tiny_tensors())
        return path.read_bytes()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 6_500), st.binary(min_size=1, max_size=9)), min_size=1, max_size=3
    ),
    kept=st.one_of(st.none(), st.integers(0, 15_000)),
)
def test_no_damage_is_another_error(
    edits: list[tuple[int, bytes]], kept: int | None, tmp_path: Path
) -> None:
    """Bytes of a header overwritten, and files cut short, end in one of our errors or are read."""
    changed = bytearray(_whole())
    for place, new in edits:
        changed[place : place + len(new)] = new
    del changed[kept if kept is not None else len(changed) :]
    path = tmp_path / f"{uuid.uuid4()}.gguf"  # two writes in one tick of the clock look alike
    path.write_bytes(changed)
    with contextlib.suppress(FornaxError):
        _use(path)


def test_the_whole_file_is_read(tmp_path: Path) -> None:
    """What is damaged above is refused for its damage."""
    path = tmp_path / "whole.gguf"
    path.write_bytes(_whole())
    _use(path)


def test_absurd_counts_allocate_nothing(tmp_path: Path) -> None:
    """A count that the file cannot hold is refused before anything is made for it."""
    starts = [_start(0, 1) + text("a") + struct.pack("<IIQ", 9, kind, 2**23) for kind in (4, 8, 12)]
    for number, start in enumerate([*starts, _start(2**19, 0), _start(0, 2**15)]):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(start + _PAD)
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
