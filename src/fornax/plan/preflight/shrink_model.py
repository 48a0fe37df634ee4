"""A decoder made narrow and shallow: the same kinds of layers in the same order, the same ratios.

Legend: D model width, N query heads, K key/value heads, H head width, F hidden width.
"""

import dataclasses
import math
from collections.abc import Callable
from itertools import groupby
from typing import Literal

from fornax.models import DecoderConfig
from fornax.models.config import LongRopeScaling, RopeConfig

__all__ = ["Depth", "shrink_model", "smallest_multiple"]

_WIDTH = 64
_VOCABULARY = 256
_HEAD_WIDTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128)

Depth = Literal["whole", "quick", "kinds"]

Pieces = Callable[..., int]
"""Logical axes to the number that sizes of all of them must be multiples of."""


def smallest_multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def shrink_model(
    model: DecoderConfig, *, pieces: Pieces, seq_len: int, original_seq_len: int, depth: Depth
) -> DecoderConfig:
    """Shrink a decoder.

    Kept: the ratio of query heads to key/value heads, that of the MLP to the model's width, tied
    embeddings, norms, caps, biases, the kind of every rope. Windows still cut documents, where
    they cut rows of the original length. Weights start larger, so that activations have the size
    that they have at the full width. Patterns of layers keep their kinds and order: of equal
    layers in a row two stay (one, unless `whole`), and the pattern repeats twice, with what is
    left over at its end; `kinds` has it once, without the rest.

    Args:
      model: the user's.
      pieces: what sizes must divide into.
      seq_len: tokens of a row.
      original_seq_len: tokens of a row of the user's.
      depth: how much of the pattern of layers; see above.
    """
    N, K = _heads(model, pieces)
    H = _head_width(model)
    D = smallest_multiple(_WIDTH, pieces("embed", "activation_embed"))
    if model.head_dim is None:
        D = N * H
        while D % pieces("embed", "activation_embed"):
            D, H = D + 8 * N, H + 8
    F = round(D * min(model.intermediate_size / model.hidden_size, 4))
    kinds = _pattern(model)
    kept = _compressed(kinds, 2 if depth == "whole" else 1)
    share = seq_len / original_seq_len
    return dataclasses.replace(
        model,
        vocab_size=smallest_multiple(_VOCABULARY, pieces("vocab", "activation_vocab")),
        hidden_size=D,
        intermediate_size=smallest_multiple(F, pieces("mlp", "activation_mlp")),
        num_layers=len(kept) if depth == "kinds" else _depth(model, len(kinds), kept),
        attention_pattern=tuple(kinds[i][0] for i in kept),
        rope_pattern=tuple(kinds[i][1] for i in kept),
        num_heads=N,
        num_kv_heads=None if model.num_kv_heads is None else K,
        head_dim=None if model.head_dim is None else H,
        max_position_embeddings=max(seq_len, round(model.max_position_embeddings * share)),
        sliding_window=_window(model, seq_len, original_seq_len),
        rope=_rope(model.rope, model.head_width, H, share),
        local_rope=model.local_rope and _rope(model.local_rope, model.head_width, H, share),
        query_pre_attn_scalar=model.query_pre_attn_scalar
        and model.query_pre_attn_scalar * H / model.head_width,
        initializer_range=model.initializer_range * math.sqrt(model.hidden_size / D),
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


def _heads(model: DecoderConfig, pieces: Pieces) -> tuple[int, int]:
    """(N, K): two groups of key heads, four where each has one query head."""
    ratio = model.num_heads // model.kv_heads
    of_q = pieces("heads", "activation_heads")
    if model.kv_heads == 1:
        return smallest_multiple(min(model.num_heads, 4), of_q), 1
    of_k = pieces("kv_heads", "activation_kv_heads")
    K = smallest_multiple(4 if ratio == 1 else 2, of_k)
    while K * ratio % of_q:
        K += of_k
    return K * ratio, K


def _head_width(model: DecoderConfig) -> int:
    """The least width that every rope can rotate its share of."""
    ropes = [rope for rope in (model.rope, model.local_rope) if rope is not None]

    def rotates(width: int, rope: RopeConfig) -> bool:
        rotated = int(width * rope.fraction)
        return rotated % 2 == 0 and rotated > 2

    fitting = (w for w in _HEAD_WIDTHS if all(rotates(w, rope) for rope in ropes))
    return next(fitting, model.head_width)


def _pattern(model: DecoderConfig) -> list[tuple]:
    """One period of (kind of attention, whether it rotates), without repetition."""
    attention, rope = model.attention_pattern, model.rope_pattern
    kinds = [(attention[i % len(attention)], rope[i % len(rope)]) for i in range(model.num_layers)]
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return kinds[:period]
    return kinds


def _compressed(kinds: list[tuple], longest: int) -> list[int]:
    """Indexes of the layers that stay: the first `longest` of each run of equal ones."""
    runs = groupby(range(len(kinds)), key=lambda i: kinds[i])
    return [i for _, run in runs for i in list(run)[:longest]]


def _depth(model: DecoderConfig, period: int, kept: list[int]) -> int:
    """Two periods at most, and what is left over."""
    repeats, left = divmod(model.num_layers, period)
    return len(kept) * min(repeats, 2) + sum(i < left for i in kept)


def _window(model: DecoderConfig, seq_len: int, original_seq_len: int) -> int | None:
    if model.sliding_window is None:
        return None
    return max(2, seq_len // 8) if model.sliding_window < original_seq_len else seq_len


def _rope(rope: RopeConfig, old_width: int, new_width: int, share: float) -> RopeConfig:
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        count = int(new_width * rope.fraction) // 2
        old = int(old_width * rope.fraction) // 2
        picks = [i * old // count for i in range(count)]
        scaling = dataclasses.replace(
            scaling,
            short_factor=tuple(scaling.short_factor[i] for i in picks),
            long_factor=tuple(scaling.long_factor[i] for i in picks),
            original_max_position_embeddings=max(
                2, round(scaling.original_max_position_embeddings * share)
            ),
        )
    return dataclasses.replace(rope, scaling=scaling)
