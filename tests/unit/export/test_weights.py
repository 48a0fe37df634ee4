"""Weights on disk: every dtype and shape comes back bit for bit, whole or in parts."""

import jax
import ml_dtypes
import numpy as np
import pytest

from fornax.export import OneDevice, weights
from fornax.export.placement import OnMesh

_DTYPES = ["bool", "int8", "uint8", "uint16", "int32", "int64", "float16", "float32", "float64"]
_EXTENDED = ["bfloat16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    found = {name: random.integers(0, 2, (5, 3)).astype(name) for name in _DTYPES}
    found |= {n: random.integers(0, 7, (4, 6)).astype(getattr(ml_dtypes, n)) for n in _EXTENDED}
    found["a/b.c/0"] = random.standard_normal((8, 4)).astype(np.float32)
    found["scalar"] = np.float32(2.5).reshape(())
    found["empty"] = np.zeros((0, 4), np.float32)
    found["zeros"] = np.zeros((7,), np.float32)
    found["complex64"] = (random.standard_normal(3) * 1j).astype(np.complex64)
    return found


def test_arrays_come_back_bit_for_bit(arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK", 32)  # several chunks an array, edges cut short
    described = {name: weights.describe(array, None) for name, array in arrays.items()}
    weights.write(tmp_path, arrays, described)
    read = weights.read(tmp_path, described, OneDevice())
    assert set(read.params) == set(arrays)
    for name, array in arrays.items():
        found = np.asarray(read.params[name])
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes(), name
    assert read.bytes == sum(a.nbytes for a in read.params.values())


def test_each_device_reads_its_own_part(tmp_path):
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    described = {"w": weights.describe(array, ("mlp", None))}
    weights.write(tmp_path, {"w": array}, described)
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    read = weights.read(tmp_path, described, OnMesh(mesh))
    shards = read.params["w"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 8)] * 4
    np.testing.assert_array_equal(np.asarray(read.params["w"]), array)
