"""What the sampler keeps on the device for each row: parameters, and tokens seen so far.

Legend: R rows (sequences that can run at once), V vocabulary, W words of 32 tokens, B biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fornax.llm.masks import token_mask
from fornax.llm.sampling_checks import MAX_BIASES
from fornax.llm.sampling_params import SamplingParams

__all__ = ["Change", "Choice", "RowParams", "SamplerState", "init_sampler_state", "load_row"]

KEEP_ALL = np.iinfo(np.int32).max
"""Above any vocabulary, one that is padded included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """How one row draws from its distribution."""

    temperature: Any
    """float32; 0 for the most likely token."""
    top_k: Any
    """int32; KEEP_ALL where all are kept."""
    top_p: Any
    """float32."""
    min_p: Any
    """float32."""
    key: Any
    """uint32 [2], the seed."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Change:
    """How one row changes its logits."""

    presence: Any
    """float32."""
    frequency: Any
    """float32."""
    repetition: Any
    """float32."""
    bias_ids: Any
    """int32 [B]; V where there is none."""
    biases: Any
    """float32 [B]."""
    counts: Any
    """int32 [V]: how often the output holds each token."""
    prompt: Any
    """uint32 [W], a bit for each token of the prompt."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowParams:
    """One row's parameters, as numpy arrays."""

    choice: Choice
    change: Change

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
        """A row for a sequence that begins, or goes on after `output`.

        Args:
            params: the request's.
            seed: of this completion; 64 bits count.
            prompt: its tokens; only used with penalties.
            output: tokens so far; only used with penalties.
            vocab_size: V.
        """
        return cls(
            choice=Choice(
                temperature=np.float32(0.0 if params.greedy else params.temperature),
                top_k=np.int32(params.top_k if 0 < params.top_k < vocab_size else KEEP_ALL),
                top_p=np.float32(params.top_p),
                min_p=np.float32(params.min_p),
                key=np.array([(int(seed) >> shift) & 0xFFFFFFFF for shift in (32, 0)], np.uint32),
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
    """Put parameters into a row; `state` may be donated.

    Args:
        state: all rows.
        row: int32.
        params: of one row.
    """
    rows = jax.tree.map(lambda all_R, one: all_R.at[row].set(one), state.rows, params)
    return SamplerState(last_token=state.last_token, rows=rows)


def _change(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> Change:
    bias = params.logit_bias or {}
    ids = np.full(MAX_BIASES, vocab_size, np.int32)
    values = np.zeros(MAX_BIASES, np.float32)
    ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
    if not params.penalized:
        prompt = output = ()
    counts = np.bincount(np.asarray(output, np.int64), minlength=vocab_size)
    return Change(
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        repetition=np.float32(params.repetition_penalty),
        bias_ids=ids,
        biases=values,
        counts=counts.astype(np.int32),
        prompt=token_mask(prompt, vocab_size),
    )
