"""Completing prompts with a key/value cache: greedy or sampled, all at once or as it comes.

Prompts of different lengths are padded on the left, so that all rows write the same cache slot.
One program reads the prompts and one makes a token; both depend on sizes that are rounded up, so
that prompts of like lengths share them.

Legend: B batch, T prompt tokens, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.models.cache import Cache, init_cache
from fornax.models.config import DecoderConfig
from fornax.models.decoder import Decoder
from fornax.models.rope_config import LongRopeScaling

__all__ = ["Sampling", "generate", "stream"]

_ROUND = 32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """Logits are divided by it before drawing; 0 takes the most likely token."""
    top_k: int | None = None
    """Draw among this many most likely tokens; null: among all."""
    top_p: float = 1.0
    """Draw among the fewest tokens whose probabilities reach this sum (Holtzman et al. 2020)."""
    seed: int = 0
    """Seed of the draws; the same seed and prompts give the same tokens."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} must be 0 (greedy) or more, and finite"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be 1 or more, or null for no limit")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} must lie in [0, 2**32)")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ConfigError(
                "top_k and top_p change nothing at temperature 0, which takes the most likely "
                "token; set a temperature, or leave them out"
            )


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | None = None,
) -> list[list[int]]:
    """Complete each prompt.

    Args:
      model: the decoder.
      prompts: token ids, each prompt at least one.
      max_tokens: tokens to make for each prompt, at most.
      sampling: how tokens are chosen; greedy by default.
      stop_tokens: ids that end a completion and are left out of it; None takes the config's
        `eos_token_ids`.

    Returns:
      The new token ids of each prompt.

    Raises:
      ConfigError: for an empty prompt, a token outside the vocabulary, or more tokens than
        `max_position_embeddings`.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    steps = stream(
        model, prompts, max_tokens=max_tokens, sampling=sampling, stop_tokens=stop_tokens
    )
    for tokens in steps:
        for completion, token in zip(completions, tokens, strict=True):
            if token is not None:
                completion.append(token)
    return completions


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | None = None,
) -> Iterator[list[int | None]]:
    """`generate`, a step at a time: one token for each prompt, None for those that have ended.

    While the caller looks at a step, the device already computes the next.
    """
    sampling = sampling or Sampling()
    stops = set(model.config.eos_token_ids if stop_tokens is None else stop_tokens)
    _check(model, prompts, max_tokens)
    return _steps(model, prompts, max_tokens, sampling, stops)


def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    stops: set[int],
) -> Iterator[list[int | None]]:
    if not prompts:
        return
    width = _round_up(max(map(len, prompts)))
    slots = _round_up(width + max_tokens)
    graphdef, state = nnx.split(model)
    prefill, decode = _programs(graphdef, sampling.top_k, sampling.temperature > 0)
    key = jax.random.key(sampling.seed)
    numbers = (np.float32(sampling.temperature), np.float32(sampling.top_p))

    def read(rows: Sequence[Sequence[int]], step: int) -> tuple[jax.Array, Cache]:
        cache = init_cache(model.config, len(rows), slots, model.compute_dtype)
        return prefill(state, cache, *_pad_left(rows), key, np.int32(step), *numbers)

    switch = _rope_switch(model.config, max(map(len, prompts)))
    token_B, cache = read(prompts, 0)
    made: list[jax.Array] = []
    ended = [False] * len(prompts)
    for step in range(max_tokens):
        made.append(token_B)
        if step + 1 == switch and step + 1 < max_tokens:
            added = np.stack(made, axis=1).tolist()
            rows = [[*prompt, *new] for prompt, new in zip(prompts, added, strict=True)]
            token_B, cache = read(rows, step + 1)
        elif step + 1 < max_tokens:  # dispatched before the current tokens are read
            token_B, cache = decode(state, cache, token_B, key, np.int32(step + 1), *numbers)
        row = [int(token) for token in np.asarray(made[-1])]
        ended = [was or token in stops for was, token in zip(ended, row, strict=True)]
        if all(ended):
            return
        yield [None if end else token for end, token in zip(ended, row, strict=True)]


def _rope_switch(config: DecoderConfig, longest: int) -> int | None:
    """After how many new tokens the keys must be recomputed, with LongRoPE's other frequencies."""
    for rope in (config.rope, config.local_rope):
        if rope is not None and isinstance(rope.scaling, LongRopeScaling):
            room = rope.scaling.original_max_position_embeddings - longest
            return room + 1 if room >= 0 else None
    return None


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    config = model.config
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} must be 1 or more")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {number} is empty; give at least one token to continue from")
        outside = [t for t in prompt if not 0 <= t < config.vocab_size]
        if outside:
            raise ConfigError(
                f"prompt {number} has token {outside[0]}, outside the vocabulary of "
                f"{config.vocab_size}; use the model's own tokenizer"
            )
        if len(prompt) + max_tokens > config.max_position_embeddings:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens, and with max_tokens={max_tokens} that "
                f"passes the model's {config.max_position_embeddings} positions; shorten the "
                f"prompt, or ask for at most "
                f"{max(0, config.max_position_embeddings - len(prompt))} tokens"
            )


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids (0: padding) int32 [B, T], T rounded up."""
    width = _round_up(max(map(len, prompts)))
    tokens_BT = np.zeros((len(prompts), width), np.int32)
    segment_ids_BT = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = prompt
        segment_ids_BT[row, width - len(prompt) :] = 1
    return tokens_BT, segment_ids_BT


def _round_up(size: int) -> int:
    return -(-size // _ROUND) * _ROUND


@functools.lru_cache(maxsize=16)
def _programs(
    graphdef: nnx.GraphDef, top_k: int | None, sampled: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled prefill and decode of one model structure."""

    def choose(
        logits_BV: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array
    ) -> jax.Array:
        if not sampled:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        return _draw(logits_BV / temperature, key, top_k, top_p)

    @functools.partial(jax.jit, donate_argnums=1)
    def prefill(
        state: Any, cache: Cache, tokens_BT: jax.Array, segment_ids_BT: jax.Array, key: jax.Array,
        step: jax.Array, temperature: jax.Array, top_p: jax.Array,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        model = nnx.merge(graphdef, state)
        logits_BV, cache = model.prefill(tokens_BT, segment_ids_BT, cache)
        return choose(logits_BV, jax.random.fold_in(key, step), temperature, top_p), cache

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(
        state: object, cache: Cache, token_B: jax.Array, key: jax.Array, step: jax.Array,
        temperature: jax.Array, top_p: jax.Array,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        model = nnx.merge(graphdef, state)
        logits_B1V, cache = cast("tuple[jax.Array, Cache]", model(token_B[:, None], cache=cache))
        return choose(logits_B1V[:, 0], jax.random.fold_in(key, step), temperature, top_p), cache

    return prefill, decode


def _draw(logits_BV: jax.Array, key: jax.Array, top_k: int | None, top_p: jax.Array) -> jax.Array:
    """One token per row, among the most likely ones; a row's draw does not depend on the
    others'."""
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    if top_k is not None:
        order_BV = order_BV[:, :top_k]
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    kept_BV = jnp.where(before_BV < top_p, sorted_BV, -jnp.inf)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits_BV.shape[0]))
    place_B = jax.vmap(jax.random.categorical)(keys_B, kept_BV)
    return jnp.take_along_axis(order_BV, place_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
