"""Log-probabilities a chunk of tokens at a time, for any device and any sharding.

What each token's gradient is multiplied by is known only after the loss, unlike in a cross entropy
that is summed. So the backward pass needs the logits once more. There are three ways to have them:

- `kept`: all tokens fit in one chunk; their logits stay until the backward pass.
- `direction`: the projection is frozen and no entropy asked for; a token's gradient with respect to
  x is then a fixed vector times the incoming number, and that vector is made in the forward pass.
- `again`: the backward pass computes them again, chunk by chunk.

Legend: T tokens, D model width, V vocabulary, n chunks, C tokens of a chunk (T = C * n, padded).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fornax.kernels._products import over_rows
from fornax.kernels._vocabulary.division import Arrays, Division, divide
from fornax.kernels._vocabulary.walk import gradient_of_x, logits_of, raw_logits, split_rows

__all__ = ["chunked_logprobs"]


@dataclasses.dataclass(frozen=True)
class _Options:
    softcap: float | None
    entropy: bool
    chunk: int
    """Tokens of one device whose logits exist at once."""
    division: Division
    dtype: jnp.dtype
    """Of logits and results."""


_Values = tuple[jax.Array, jax.Array]


def chunked_logprobs(
    x: jax.Array,
    w_DV: jax.Array,
    targets: jax.Array,
    inverse: jax.Array,
    *,
    softcap: float | None,
    entropy: bool,
    chunk: int,
) -> _Values:
    """Log-probabilities and entropies (zeros where not asked for), shaped like the targets.

    Args:
        x: [*tokens, D].
        w_DV: output projection.
        targets: int32 [*tokens].
        inverse: 1 / temperature of each token: rows that only fill up a chunk hold zeros.
        softcap: of the logits, before the temperature.
        entropy: whether it is computed.
        chunk: tokens of the whole mesh whose logits exist at once.
    """
    division = divide(x, w_DV)
    options = _Options(
        softcap=softcap,
        entropy=entropy,
        chunk=max(1, chunk // division.token_shards),
        division=division,
        dtype=jnp.promote_types(x.dtype, jnp.float32),
    )
    return _values(options, x, w_DV, targets, inverse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(
    options: _Options,
    x: jax.Array,
    w_DV: jax.Array,
    targets: jax.Array,
    inverse: jax.Array,
) -> _Values:
    def local(x: jax.Array, w_DV: jax.Array, targets: jax.Array, inverse: jax.Array):
        whole_DV = options.division.whole_width(w_DV)

        def one(x_CD: jax.Array, targets_C: jax.Array, inverse_C: jax.Array):
            _, scored = _score(options, x_CD, whole_DV, targets_C, inverse_C)
            return scored.logprob_C, scored.entropy_C

        return _by_chunks(options, one, x, targets, inverse)

    return options.division.run(local, (x, w_DV, targets, inverse), "tt")


def _values_fwd(options: _Options, x: Arrays, w_DV: Arrays, targets: Arrays, inverse: Arrays):
    frozen = not w_DV.perturbed
    arrays = (x.value, w_DV.value, targets.value, inverse.value)
    tokens = math.prod(arrays[0].shape[:-1]) // options.division.token_shards
    if tokens <= options.chunk:
        *values, lse, logits = options.division.run(
            functools.partial(_local_kept, options), arrays, "tttl"
        )
        return tuple(values), (*arrays, lse, values[1], logits)
    if frozen and not options.entropy:
        logprobs, direction = options.division.run(
            functools.partial(_local_direction, options), arrays, "tx"
        )
        return (logprobs, jnp.zeros_like(logprobs)), (direction, arrays[1])
    *values, lse = options.division.run(functools.partial(_local_again, options), arrays, "ttt")
    return tuple(values), (*arrays, lse, values[1], None)


def _local_again(options: _Options, x: jax.Array, w_DV: jax.Array, *tokens: jax.Array):
    """Values, and the normalisers that spare the backward pass half of the work."""
    whole_DV = options.division.whole_width(w_DV)

    def one(x_CD: jax.Array, targets_C: jax.Array, inverse_C: jax.Array):
        _, scored = _score(options, x_CD, whole_DV, targets_C, inverse_C)
        return scored.logprob_C, scored.entropy_C, scored.lse_C

    return _by_chunks(options, one, x, *tokens)


def _local_kept(
    options: _Options, x: jax.Array, w_DV: jax.Array, targets: jax.Array, inverse: jax.Array
):
    """Values, normalisers, and the logits [*tokens, V] before the temperature."""
    logits_TV, scored = _score(
        options,
        x.reshape(-1, x.shape[-1]),
        options.division.whole_width(w_DV),
        targets.reshape(-1),
        inverse.reshape(-1),
    )
    shaped = (scored.logprob_C, scored.entropy_C, scored.lse_C)
    return *(a.reshape(targets.shape) for a in shaped), logits_TV.reshape(*targets.shape, -1)


def _local_direction(options: _Options, x: jax.Array, w_DV: jax.Array, *tokens: jax.Array):
    """Values, and the gradient of each token's log-probability with respect to its x."""
    whole_DV = options.division.whole_width(w_DV)

    def one(x_CD: jax.Array, targets_C: jax.Array, inverse_C: jax.Array):
        logits_CV, scored = _score(options, x_CD, whole_DV, targets_C, inverse_C)
        ones_C = jnp.ones_like(scored.lse_C)
        slope_CV = _slope(
            options, logits_CV, scored.lse_C, targets_C, inverse_C, ones_C, None, None
        )
        return scored.logprob_C, gradient_of_x(
            options.division, slope_CV.astype(x_CD.dtype), whole_DV, options.dtype
        )

    return _by_chunks(options, one, x, *tokens)


def _values_bwd(options: _Options, saved: tuple[Arrays, ...], cotangents: tuple[Arrays, Arrays]):
    to_logprob, to_entropy = (None if isinstance(c, SymbolicZero) else c for c in cotangents)
    if not options.entropy:
        to_entropy = None
    if len(saved) == 2:
        direction, w_DV = saved
        scale = jnp.zeros(direction.shape[:-1], options.dtype) if to_logprob is None else to_logprob
        dx = direction.astype(options.dtype) * scale[..., None]
        dx = jnp.where(scale[..., None] != 0, dx, 0).astype(direction.dtype)
        return dx, jnp.zeros_like(w_DV), None, None
    x, w_DV, targets, inverse, lse, entropy, logits = saved
    zeros = jnp.zeros(targets.shape, options.dtype)
    given = {
        "targets": targets,
        "inverse": inverse,
        "lse": lse,
        "entropy": entropy,
        "to_logprob": zeros if to_logprob is None else to_logprob,
    }
    if to_entropy is not None:
        given["to_entropy"] = to_entropy
    names = tuple(given)
    inputs = "xw" + "t" * len(names)
    arrays = (x, w_DV, *given.values())
    if logits is not None:
        arrays, inputs = (*arrays, logits), inputs + "l"

    def local(x: jax.Array, w_DV: jax.Array, *rest: jax.Array):
        tokens = dict(zip(names, rest, strict=False))
        kept = rest[-1] if logits is not None else None
        return _local_gradients(options, x, w_DV, tokens, kept)

    dx, dw_DV = options.division.run(local, arrays, "xw", inputs)
    return dx, dw_DV, None, None


_values.defvjp(_values_fwd, _values_bwd, symbolic_zeros=True)


def _local_gradients(
    options: _Options,
    x: jax.Array,
    w_DV: jax.Array,
    tokens: dict[str, jax.Array],
    logits: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    whole_DV = options.division.whole_width(w_DV)
    flat = {"x": x.reshape(-1, x.shape[-1]), **{k: a.reshape(-1) for k, a in tokens.items()}}

    def step(dw_DV: jax.Array, chunk: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_CD, inverse_C = chunk["x"], chunk["inverse"]
        logits_CV = chunk.get("logits")
        if logits_CV is None:
            logits_CV = _logits(options, x_CD, whole_DV)
        slope_CV = _slope(
            options,
            logits_CV,
            chunk["lse"],
            chunk["targets"],
            inverse_C,
            chunk["to_logprob"],
            chunk.get("to_entropy"),
            chunk["entropy"],
        ).astype(x_CD.dtype)
        dw_DV += over_rows(x_CD, slope_CV, dtype=options.dtype)
        return dw_DV, gradient_of_x(options.division, slope_CV, whole_DV, options.dtype)

    start = jnp.zeros(whole_DV.shape, options.dtype)
    if logits is not None:
        dw_DV, dx_TD = step(start, {**flat, "logits": logits.reshape(-1, logits.shape[-1])})
    else:
        chunks, join = split_rows(options.chunk, flat)
        dw_DV, dx_nCD = jax.lax.scan(step, start, chunks)
        dx_TD = join(dx_nCD)
    return dx_TD.reshape(x.shape), options.division.own_width(dw_DV).astype(w_DV.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scored:
    logprob_C: jax.Array
    entropy_C: jax.Array
    """Zeros where it is not asked for."""
    lse_C: jax.Array


def _logits(options: _Options, x_CD: jax.Array, w_DV: jax.Array) -> jax.Array:
    """Before the temperature, which every user multiplies in: a product of its own would be
    written to memory and read again."""
    raw_CV = raw_logits(x_CD, w_DV, options.dtype)
    return logits_of(raw_CV, options.softcap)


def _score(
    options: _Options,
    x_CD: jax.Array,
    w_DV: jax.Array,
    targets_C: jax.Array,
    inverse_C: jax.Array,
) -> tuple[jax.Array, _Scored]:
    division = options.division
    logits_CV = _logits(options, x_CD, w_DV)
    V = logits_CV.shape[1]
    highest_C = division.over_vocabulary(jax.lax.pmax, jnp.max(logits_CV, axis=-1)) * inverse_C
    mass_CV = jnp.exp(logits_CV * inverse_C[:, None] - highest_C[:, None])
    total_C = division.over_vocabulary(jax.lax.psum, jnp.sum(mass_CV, axis=-1))
    lse_C = highest_C + jnp.log(total_C)
    own_C = targets_C - division.first_token(V)
    here_C = (own_C >= 0) & (own_C < V)
    index_C1 = jnp.clip(own_C, 0, V - 1)[:, None]
    target_C = jnp.take_along_axis(logits_CV, index_C1, axis=-1)[:, 0] * inverse_C
    target_C = division.over_vocabulary(jax.lax.psum, jnp.where(here_C, target_C, 0))
    beyond_C = targets_C >= V * division.vocabulary_shards
    logprob_C = jnp.where(beyond_C, jnp.nan, target_C - lse_C)
    logprob_C = jnp.where(targets_C < 0, 0, logprob_C)
    entropy_C = jnp.zeros_like(lse_C)
    if options.entropy:
        # The barrier keeps XLA from sharing exp with the sum above: shared it is written to memory
        # and, on CPU, an order of magnitude slower than computed twice inside two sums.
        again_C, top_C = jax.lax.optimization_barrier((inverse_C, highest_C))
        gap_CV = logits_CV * again_C[:, None] - top_C[:, None]
        mean_C = jnp.sum(jnp.exp(gap_CV) * gap_CV, axis=-1)
        entropy_C = jnp.log(total_C) - division.over_vocabulary(jax.lax.psum, mean_C) / total_C
    return logits_CV, _Scored(logprob_C, entropy_C, lse_C)


def _slope(
    options: _Options,
    logits_CV: jax.Array,
    lse_C: jax.Array,
    targets_C: jax.Array,
    inverse_C: jax.Array,
    to_logprob_C: jax.Array,
    to_entropy_C: jax.Array | None,
    entropy_C: jax.Array | None,
) -> jax.Array:
    """Return the gradient of sum(to_logprob * logprob + to_entropy * entropy) at x w.

    With p the softmax of the scaled logits and H its entropy, the slopes of a log-probability and
    of the entropy are (hit - p) and -p (log p + H).
    """
    V = logits_CV.shape[1]
    to_logprob_C = jnp.where(targets_C >= 0, to_logprob_C, 0)
    used_C = to_logprob_C != 0
    logp_CV = logits_CV * inverse_C[:, None] - lse_C[:, None]
    pull_CV = to_logprob_C[:, None]
    if to_entropy_C is not None and entropy_C is not None:
        used_C |= to_entropy_C != 0
        pull_CV = pull_CV + to_entropy_C[:, None] * (logp_CV + entropy_C[:, None])
    index_1V = jax.lax.broadcasted_iota(targets_C.dtype, (1, V), 1)
    hit_CV = index_1V == (targets_C - options.division.first_token(V))[:, None]
    slope_CV = jnp.where(hit_CV, to_logprob_C[:, None], 0) - jnp.exp(logp_CV) * pull_CV
    if options.softcap is not None:
        slope_CV *= 1 - (logits_CV / options.softcap) ** 2
    return jnp.where(used_C[:, None], slope_CV * inverse_C[:, None], 0)


def _by_chunks(
    options: _Options, one: Callable[..., tuple[jax.Array, ...]], x: jax.Array, *tokens: jax.Array
):
    """Run `one` over chunks of (x [*tokens, D], *tokens) and shape results as tokens are."""
    shape = tokens[0].shape
    flat = (x.reshape(-1, x.shape[-1]), *map(jnp.ravel, tokens))
    chunks, join = split_rows(options.chunk, flat)
    _, found = jax.lax.scan(lambda _, chunk: (None, one(*chunk)), None, chunks)
    joined = (join(a) for a in found)
    return tuple(a.reshape(*shape, *a.shape[1:]) for a in joined)
