"""The TPU flash kernel's blocks fit its calls, and what we say it computes is what it visits."""

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as upstream
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

from fornax.kernels._attention.blocks import Band, Blocks, choose_blocks, product_flops
from fornax.kernels._attention.splash import band_mask
from fornax.mesh import balanced_order


def _seen(band: Band, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    distance = queries[:, None] - keys[None, :]
    seen = np.ones(distance.shape, bool)
    if band.least is not None:
        seen &= distance >= band.least
    if band.most is not None:
        seen &= distance <= band.most
    return seen


@pytest.mark.parametrize("band", [Band(0, None), Band(0, 5), Band(-5, 5), Band(0, 0)])
@pytest.mark.parametrize("first", [0, 12])
def test_visited_blocks_are_those_with_a_score(band: Band, first: int) -> None:
    T, S, blocks = 12, 24, (4, 6)
    seen = _seen(band, np.arange(first, first + T), np.arange(S))
    tiles = seen.reshape(T // blocks[0], blocks[0], S // blocks[1], blocks[1])
    assert band.visited((T, S), blocks, first) == tiles.any(axis=(1, 3)).sum()


def test_visited_blocks_are_those_that_the_kernel_runs() -> None:
    T, window, blocks = 1024, 300, (128, 256)
    mask = upstream.LocalMask((T, T), window_size=(window - 1, 0), offset=0)
    info, _ = splash_attention_mask_info.process_mask(
        upstream.MultiHeadMask([mask]), blocks, head_shards=1, q_seq_shards=1
    )
    assert info.block_mask is not None
    ran = np.count_nonzero(info.block_mask)
    assert Band(least=0, most=window - 1).visited((T, T), blocks) == ran


@pytest.mark.parametrize("window", [None, 300, 1500])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_mask_that_looks_at_few_elements_is_the_librarys(window: int | None, parts: int) -> None:
    T = 4096
    theirs = (
        upstream.CausalMask((T, T))
        if window is None
        else upstream.LocalMask((T, T), window_size=(window - 1, 0), offset=0)
    )
    order = balanced_order(parts)
    theirs.q_sequence = theirs.q_sequence.reshape(len(order), -1)[order].reshape(-1)
    band = Band(least=0, most=None if window is None else window - 1)
    found, expected = (
        splash_attention_mask_info.process_mask(
            upstream.MultiHeadMask([mask]), (256, 512), head_shards=1, q_seq_shards=parts
        )[0]
        for mask in (band_mask(upstream, (T, T), band, order), theirs)
    )
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("window", [None, 300])
def test_balanced_devices_run_the_blocks_of_the_middle_queries(window: int | None) -> None:
    """Each of them, without a window; else at most."""
    T, devices, blocks = 2048, 4, (128, 256)
    band = Band(least=0, most=None if window is None else window - 1)
    mask = (
        upstream.CausalMask((T, T))
        if window is None
        else upstream.LocalMask((T, T), window_size=(window - 1, 0), offset=0)
    )
    parts = np.arange(T, dtype=np.int32).reshape(2 * devices, -1)
    mask.q_sequence = parts[balanced_order(devices)].reshape(-1)
    info, _ = splash_attention_mask_info.process_mask(
        upstream.MultiHeadMask([mask]), blocks, head_shards=1, q_seq_shards=devices
    )
    assert info.block_mask is not None
    ran = np.count_nonzero(info.block_mask[0].reshape(devices, -1), axis=1)
    own = T // devices
    middle = band.visited((own, T), blocks, (T - own) // 2)
    last = band.visited((own, T), blocks, T - own)
    if window is None:
        assert ran.tolist() == [middle] * devices
        assert middle < 0.65 * last
    else:
        assert max(ran) == middle


@pytest.mark.parametrize("T", [128, 384, 2048, 2176, 8192, 131072])
@pytest.mark.parametrize("window", [None, 100, 1024])
def test_blocks_divide_the_length(T: int, window: int | None) -> None:
    blocks = choose_blocks(T // 2 if T % 256 == 0 else T, T, 128, 2, window)
    assert T % blocks.keys == T % blocks.keys_backward == T % blocks.keys_dq == 0
    assert (T // 2 if T % 256 == 0 else T) % blocks.queries == 0
    assert blocks.keys % blocks.keys_compute == 0
    assert blocks.keys_backward % blocks.keys_backward_compute == 0
    assert blocks.fused == (T // blocks.keys_backward <= 4)


def test_operations_of_dense_attention_are_its_products() -> None:
    whole = Band(least=None, most=None)
    blocks = Blocks(128, 128, 128, 128, 128, 128, 128, fused=False)
    flops = product_flops(whole, blocks, T=256, S=512, H=64, V=32)
    product = 2 * 256 * 512
    assert flops == {
        "fwd": product * (64 + 32),
        "dkv": product * (2 * 64 + 2 * 32),
        "dq": product * (2 * 64 + 32),
    }
