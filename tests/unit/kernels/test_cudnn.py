"""Attention on GPU: what cuDNN is asked for, what declines and why, what a remat policy saves."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.cuda import lower_for_cuda

from fornax import kernels
from fornax.kernels._attention import cudnn
from fornax.mesh import MeshConfig, make_mesh, use_mesh
from fornax.models.remat import rematerialise

B, T, N, K, H = 2, 2048, 8, 2, 128


def _arrays(dtype: Any = jnp.bfloat16, t: int = T, h: int = H) -> list[jax.ShapeDtypeStruct]:
    shapes = ((B, t, N, h), (B, t, K, h), (B, t, K, h))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def _ids(t: int = T) -> dict[str, jax.Array]:
    names = ("segment_ids_q_BT", "segment_ids_k_BS", "positions_q_BT", "positions_k_BS")
    return {**dict.fromkeys(names, jnp.ones((B, t), jnp.int32)), "consecutive": True}


def _calls(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], remat: str = "none"
) -> Counter[str]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernels.attention(q, k, v, scale=0.1, **options)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(rematerialise(attend, remat)(*arrays).astype(jnp.float32))

    text = lower_for_cuda(monkeypatch, jax.value_and_grad(loss, (0, 1, 2)), *_arrays())
    return Counter(re.findall(r"__cudnn\$fmha(\w+)", text))


def test_one_document_a_row_is_one_call_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"causal": False}, {"window": 100}):
        assert _calls(monkeypatch, options) == {"Softmax": 1, "SoftmaxBackward": 1}


def test_packed_documents_take_a_masked_call_for_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = {"ScaleBiasSoftmax": 2, "ScaleBiasSoftmaxBackward": 2}
    assert _calls(monkeypatch, _ids()) == expected


@pytest.mark.parametrize(("remat", "forward"), [("full", 2), ("save_attention", 1), ("dots", 1)])
def test_a_policy_that_saves_attention_does_not_run_the_kernel_again(
    remat: str, forward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _calls(monkeypatch, {}, remat)
    assert found == {"Softmax": forward, "SoftmaxBackward": 1}
    found = _calls(monkeypatch, _ids(), remat)
    assert found == {"ScaleBiasSoftmax": 2 * forward, "ScaleBiasSoftmaxBackward": 2}


def test_runs_on_each_device_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_mesh(make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])):
        assert _calls(monkeypatch, {}) == {"Softmax": 1, "SoftmaxBackward": 1}


def _reason(options: dict[str, Any], arrays: list[jax.ShapeDtypeStruct]) -> str:
    def attend(*arrays: jax.Array) -> jax.Array:
        return kernels.attention(*arrays, scale=1.0, implementation="cudnn", **options)

    with kernels.target_platform("gpu"), pytest.raises(kernels.KernelError) as raised:
        jax.eval_shape(attend, *arrays)
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "arrays", "reason"),
    [
        ({}, {"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
        ({}, {"h": 36}, "multiple of 8 up to 256, not 36"),
        ({}, {"h": 512}, "multiple of 8 up to 256, not 512"),
        ({"softcap": 30.0}, {}, "does not support softcap"),
        ({"sinks_N": jnp.zeros(N)}, {}, "does not support sinks"),
        (_ids(2047), {"t": 2047}, "even lengths, not for 2047 queries"),
    ],
)
def test_declines_with_the_reason(
    options: dict[str, Any], arrays: dict[str, Any], reason: str
) -> None:
    assert reason in _reason(options, _arrays(**arrays))


def test_declines_a_divided_length() -> None:
    with use_mesh(make_mesh(MeshConfig(fsdp=1, context=8))):
        assert "divides the length over 8 devices" in _reason({}, _arrays())


def _call(batch: int, length: int, **changes: Any) -> kernels.AttentionCall:
    call = kernels.AttentionCall(
        platform="gpu",
        batch=batch,
        queries=length,
        keys=length,
        heads=N,
        kv_heads=K,
        head_dim=H,
        value_dim=H,
        dtype="bfloat16",
        causal=True,
        window=None,
        softcap=None,
        sinks=False,
        positions=True,
        consecutive=True,
        balanced=False,
        segments=True,
        length_shards=1,
        exchange="auto",
    )
    return kernels.AttentionCall(**{**vars(call), **changes})


def test_a_mask_is_bounded_or_declined() -> None:
    for batch, length in [(1, 2048), (64, 2048), (8, 8192), (1, 32768)]:
        chunk = cudnn.chunk_of(_call(batch, length))
        assert chunk is not None
        assert length % chunk == 0
        assert 2 * batch * chunk * length <= cudnn.MOST_MASK_BYTES
        assert length // chunk <= cudnn.MOST_CHUNKS
    assert cudnn.chunk_of(_call(1, 131_072)) is None
    reason = cudnn.declines(_call(1, 131_072))
    assert reason is not None
    assert "34,359,738,368 bytes does not divide into 16 chunks" in reason
    assert cudnn.declines(_call(1, 131_072, segments=False)) is None
