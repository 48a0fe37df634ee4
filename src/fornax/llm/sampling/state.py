"""What the sampler keeps on the device for each row: parameters, and tokens seen so far.

Legend: R rows (sequences that can run at once), V vocabulary, W words of 32 tokens, B biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fornax.llm.sampling.masks import token_mask
from fornax.llm.sampling_params import MAX_BIASES, SamplingParams

__all__ = [
    "KEEP_ALL",
    "DrawParams",
    "LogitParams",
    "RowParams",
    "SamplerState",
    "init_sampler_state",
    "load_row",
]

KEEP_ALL = np.iinfo(np.int32).max
"""Above any vocabulary, one that is padded included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawParams:
    """How one row draws from its distribution."""

    temperature: jax.Array
    """float32; 0 for the most likely token."""
    top_k: jax.Array
    """int32; KEEP_ALL where all are kept."""
    top_p: jax.Array
    """float32."""
    min_p: jax.Array
    """float32."""
    key: jax.Array
    """uint32 [2], the seed."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitParams:
    """How one row changes its logits."""

    presence: jax.Array
    """float32."""
    frequency: jax.Array
    """float32."""
    repetition: jax.Array
    """float32."""
    bias_ids: jax.Array
    """int32 [B]; V where there is none."""
    biases: jax.Array
    """float32 [B]."""
    counts: jax.Array
    """int32 [V]: how often the output holds each token."""
    prompt: jax.Array
    """uint32 [W], a bit for each token of the prompt."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowParams:
    """One row's parameters, as numpy arrays."""

    choice: DrawParams
    change: LogitParams

    @classmethod
    def make(
        cls,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
    ) -> Self:
        """A row for a sequence that begins, or continues after `output`.

        Args:
            seed: of this completion; 64 bits count.
            prompt: its tokens; only used with penalties.
            output: tokens so far; only used with penalties.
        """
        return cls(
            choice=DrawParams(
                temperature=_leaf(0.0 if params.greedy else params.temperature, np.float32),
                top_k=_leaf(params.top_k if 0 < params.top_k < vocab_size else KEEP_ALL, np.int32),
                top_p=_leaf(params.top_p, np.float32),
                min_p=_leaf(params.min_p, np.float32),
                key=_leaf([(int(seed) >> shift) & 0xFFFFFFFF for shift in (32, 0)], np.uint32),
            ),
            change=_change(params, prompt, output, vocab_size),
        )

    @classmethod
    def default(cls, vocab_size: int) -> Self:
        """A row that always takes the most likely token."""
        greedy = SamplingParams(temperature=0.0)
        return cls.make(greedy, seed=0, prompt=(), output=(), vocab_size=vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """All rows' parameters, tokens seen, and the token sampled last."""

    last_token: jax.Array
    """int32 [R]."""
    rows: RowParams
    """Each leaf with a leading R."""


def init_sampler_state(rows: int, vocab_size: int) -> SamplerState:
    """A state of greedy rows: 4 V bytes a row, and a little."""
    default = RowParams.default(vocab_size)
    stack = jax.tree.map(lambda x: jnp.tile(jnp.asarray(x)[None], (rows, *[1] * x.ndim)), default)
    return SamplerState(last_token=jnp.zeros(rows, jnp.int32), rows=stack)


def load_row(state: SamplerState, row: jax.Array, params: RowParams) -> SamplerState:
    """Put parameters into a row; `state` may be donated."""
    rows = jax.tree.map(lambda all_R, one: all_R.at[row].set(one), state.rows, params)
    return SamplerState(last_token=state.last_token, rows=rows)


def _change(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> LogitParams:
    bias = params.logit_bias or {}
    ids = np.full(MAX_BIASES, vocab_size, np.int32)
    values = np.zeros(MAX_BIASES, np.float32)
    ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
    if not params.penalized:
        prompt = output = ()
    counts = np.bincount(np.asarray(output, np.int64), minlength=vocab_size)
    return LogitParams(
        presence=_leaf(params.presence_penalty, np.float32),
        frequency=_leaf(params.frequency_penalty, np.float32),
        repetition=_leaf(params.repetition_penalty, np.float32),
        bias_ids=_leaf(ids, np.int32),
        biases=_leaf(values, np.float32),
        counts=_leaf(counts, np.int32),
        prompt=_leaf(token_mask(prompt, vocab_size), np.uint32),
    )


def _leaf(value: object, dtype: DTypeLike) -> jax.Array:
    """Numpy on the host, which programs take where the device has an array."""
    return cast("jax.Array", np.asarray(value, dtype))
