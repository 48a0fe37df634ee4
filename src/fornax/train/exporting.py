"""The model zoo's functions for `export`: a decoder in one shot, over padded rows of tokens.

Every operation is left to XLA (no native or Pallas kernel), so that a bundle runs on any platform
without Fornax.

Legend: B rows, T tokens of a row, D model width, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from fornax import export
from fornax.config.errors import ConfigError
from fornax.kernels.registry import target_platform
from fornax.models import Decoder, DecoderConfig
from fornax.models.rope_config import DynamicNTKScaling, LongRopeScaling
from fornax.train.weights import load_decoder

if TYPE_CHECKING:
    from fornax.export.manifest import Manifest

__all__ = ["FUNCTIONS", "Pooling", "export_model", "model_functions"]

Pooling = Literal["mean", "last"]

BATCH_BUCKETS = (1, 8)
LENGTH_BUCKETS = (64, 256)

Outputs = dict[str, jax.Array]


def logits(decoder: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array) -> Outputs:
    """`logits` float32 [B, T, V]: of the next token after each."""
    return {"logits": decoder.logits(_hidden(decoder, tokens_BT, lengths_B))}


def next_token(decoder: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array) -> Outputs:
    """`logits` float32 [B, V]: of the token that follows each row."""
    x_BTD = _hidden(decoder, tokens_BT, lengths_B)
    return {"logits": decoder.logits(_last(x_BTD, lengths_B)[:, None])[:, 0]}


def score(decoder: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array) -> Outputs:
    """How likely a text is: float32 `logprob` [B] in nats, int32 `tokens` [B] that it counts, and
    `logprobs` [B, T] of each token after those before it, 0 for the first.
    """
    x_BTD = _hidden(decoder, tokens_BT, lengths_B)
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)

    def row(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        """One row's logits at a time: those of a whole batch need not exist."""
        x_TD, targets_T = of
        logits_TV = decoder.logits(x_TD[None])[0]
        found_T1 = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=1)
        return found_T1[:, 0] - jax.nn.logsumexp(logits_TV, axis=1)

    after_BT = jnp.roll(jax.lax.map(row, (x_BTD, targets_BT)), 1, axis=1)
    index_T = jnp.arange(tokens_BT.shape[1])
    counted_BT = (index_T > 0) & (index_T < lengths_B[:, None])
    logprobs_BT = jnp.where(counted_BT, after_BT, 0.0)
    return {
        "logprob": jnp.sum(logprobs_BT, axis=1),
        "tokens": jnp.maximum(lengths_B - 1, 0),
        "logprobs": logprobs_BT,
    }


def embedding(
    decoder: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array, *, pooling: Pooling = "mean"
) -> Outputs:
    """`embedding` float32 [B, D]: the final norm's output, its mean or that of the last token."""
    x_BTD = _hidden(decoder, tokens_BT, lengths_B).astype(jnp.float32)
    if pooling == "last":
        return {"embedding": _last(x_BTD, lengths_B)}
    mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    sum_BD = jnp.sum(jnp.where(mask_BT[:, :, None], x_BTD, 0.0), axis=1)
    return {"embedding": sum_BD / jnp.maximum(lengths_B, 1)[:, None]}


FUNCTIONS: Mapping[str, Callable[..., Outputs]] = {
    "logits": logits,
    "next_token": next_token,
    "score": score,
    "embedding": embedding,
}
"""What can be exported of a decoder; each takes (decoder, tokens [B, T], lengths [B])."""


def model_functions(
    names: Sequence[str], *, pooling: Pooling = "mean"
) -> dict[str, Callable[..., Outputs]]:
    """Functions as `export.save` takes them: (decoder, tokens=, lengths=) to outputs.

    Raises:
      ConfigError: a name that is not in `FUNCTIONS`, or none.
    """
    if not names:
        raise ConfigError(f"name a function of the model: {', '.join(FUNCTIONS)}")
    found: dict[str, Callable[..., Outputs]] = {}
    for name in names:
        if name not in FUNCTIONS:
            raise ConfigError(
                f"function {name!r} is none of the model's ({', '.join(FUNCTIONS)}); one of your "
                "own is named FILE.py:NAME"
            )
        function = FUNCTIONS[name]
        if name == "embedding":
            function = functools.partial(embedding, pooling=pooling)
        found[name] = functools.partial(_call, function)
    return found


def export_model(
    model: str | Path | Decoder,
    out: str | Path,
    *,
    functions: Sequence[str] = ("logits",),
    batch: Sequence[int] = BATCH_BUCKETS,
    lengths: Sequence[int] | None = None,
    dtype: Any = None,
    pooling: Pooling = "mean",
    **options: Any,
) -> "Manifest":
    """Seal a decoder's functions in a bundle; their input is int32 `tokens` [b, t].

    Args:
      model: a run directory, a Hugging Face directory, or a decoder.
      out: the bundle to make.
      functions: names out of `FUNCTIONS`; the first is the bundle's default.
      batch: rows that it is compiled for.
      lengths: tokens of a row that it is compiled for; None takes 64 and 256, as far as the model
        reads.
      dtype: of the weights; None keeps their own.
      pooling: of `embedding`.
      **options: further ones of `export.save`: platforms, overwrite, executables, ...

    Raises:
      ConfigError: a place without a model, an unknown function, or a length that the model cannot
        read.
      BundleError: from `export.save`.
    """
    chosen = model_functions(functions, pooling=pooling)
    decoder = model if isinstance(model, Decoder) else load_decoder(model, dtype=dtype)
    config = decoder.config
    spec = export.Spec(
        ("b", "t"),
        "int32",
        lengths="lengths",
        axes=("batch", "length"),
        low=0,
        high=config.vocab_size,
    )
    return export.save(
        out,
        chosen,
        decoder,
        inputs={name: {"tokens": spec} for name in chosen},
        buckets={"b": list(batch), "t": list(_lengths(lengths, config))},
        metadata={"family": config.family, "vocab_size": config.vocab_size}
        | options.pop("metadata", {}),
        **options,
    )


def _lengths(asked: Sequence[int] | None, config: DecoderConfig) -> Sequence[int]:
    most = config.max_position_embeddings
    if asked is None:
        return [size for size in LENGTH_BUCKETS if size < most] or [most]
    over = [size for size in asked if size > most]
    if over:
        raise ConfigError(
            f"the model reads {most} tokens at most, and --length names {over[0]}; leave it out"
        )
    return asked


def _call(
    function: Callable[..., Outputs], decoder: Decoder, *, tokens: jax.Array, lengths: jax.Array
) -> Outputs:
    # Named for the kernels' choice only: there is no native kernel off the CPU, and attention is
    # XLA's.
    with target_platform("gpu"):
        return function(decoder, tokens, lengths)


def _hidden(decoder: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """The final norm's output x [B, T, D]; padding is seen by nobody."""

    def rows(tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        index_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        segment_ids_BT = (index_T < lengths_B[:, None]).astype(jnp.int32)
        positions_BT = jnp.where(segment_ids_BT > 0, index_T, 0)
        return decoder.hidden(
            tokens_BT, positions_BT, segment_ids_BT, consecutive=True, implementation="xla"
        )

    ropes = (decoder.config.rope, decoder.config.local_rope)
    scalings = (rope.scaling for rope in ropes if rope is not None)
    if any(isinstance(scaling, DynamicNTKScaling | LongRopeScaling) for scaling in scalings):
        # They look at the longest row of the batch, which must not be a neighbour.
        one = jax.vmap(lambda tokens_T, length: rows(tokens_T[None], length[None])[0])
        return one(tokens_BT, lengths_B)
    return rows(tokens_BT, lengths_B)


def _last(x_BTD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """x [B, D] at each row's last token."""
    last_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
    return jnp.take_along_axis(x_BTD, last_B11, axis=1)[:, 0]
