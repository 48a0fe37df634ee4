"""What each completion or token was worth: advantages, penalties, and the weights of tokens.

Every function takes numpy arrays or jax arrays and returns the same kind.

Legend: N prompts, G completions of a prompt (a group), B rows, T tokens of a row.
"""

from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from fornax.config.errors import ConfigError

__all__ = [
    "TokenWeights",
    "aggregation_weights",
    "gae",
    "group_relative",
    "leave_one_out",
    "overlong_penalty",
    "reinforce_plus_plus",
    "whiten",
]

Array = Any
"""A numpy or a jax array."""


class TokenWeights(NamedTuple):
    """How a batch's loss is put together: sum(token weight * loss) / sum(normaliser).

    Both sums add up over micro-batches, so accumulation is exact.
    """

    token_N: Array
    """The weight of each token of sequence n."""
    normaliser_N: Array
    """What sequence n adds to the denominator."""


def group_relative(
    rewards_NG: Array,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> Array:
    """GRPO's advantages (Shao et al. 2024, section 4.1.2): rewards against their group's mean.

    A = (r - mean of the group) / (s + eps), s the standard deviation (n - 1 in its denominator) of
    the group, of the whole batch (`batch`; Hu et al. 2025), or A = r - mean (`none`, Dr. GRPO; Liu
    et al. 2025: dividing favours prompts that are nearly always, or never, solved).

    Args:
        rewards_NG: one a completion. A NaN (no reward) is left out of mean and deviation and gets
            advantage 0.
        scale: what divides.
        eps: keeps a group without spread from dividing by 0; its advantages are 0 anyway.

    Returns:
        Advantages [N, G]; each group's sum to 0.

    Raises:
        ConfigError: an unknown `scale`, or a group of one, whose advantage would always be 0.

    Example:
        >>> group_relative(np.array([[1.0, 0.0]]), scale="none")
        array([[ 0.5, -0.5]])
    """
    _check_groups("group_relative", rewards_NG)
    xp = _namespace(rewards_NG)
    known_NG = ~xp.isnan(rewards_NG)
    centred_NG = rewards_NG - _mean(xp, rewards_NG, known_NG, axis=1)
    if scale == "none":
        return xp.where(known_NG, centred_NG, 0)
    if scale == "group":
        deviation = _deviation(xp, rewards_NG, known_NG, axis=1)
    elif scale == "batch":
        deviation = _deviation(xp, rewards_NG, known_NG, axis=None)
    else:
        raise ConfigError(f"scale={scale!r} is unknown; use one of: group, batch, none")
    return xp.where(known_NG, centred_NG / (deviation + eps), 0)


def leave_one_out(rewards_NG: Array) -> Array:
    """RLOO's advantages (Ahmadian et al. 2024): each reward less the mean of the OTHERS' rewards.

    A_i = r_i - mean of r_j over j != i = G / (G - 1) (r_i - mean r). The baseline does not depend
    on its own sample, so the gradient stays unbiased.

    Args:
        rewards_NG: one a completion; a NaN counts for nobody and gets 0.

    Returns:
        Advantages [N, G].

    Raises:
        ConfigError: a group of one.

    Example:
        >>> leave_one_out(np.array([[3.0, 0.0, 0.0]]))
        array([[ 3. , -1.5, -1.5]])
    """
    _check_groups("leave_one_out", rewards_NG)
    xp = _namespace(rewards_NG)
    known_NG = ~xp.isnan(rewards_NG)
    count_N1 = xp.sum(known_NG, axis=1, keepdims=True)
    total_N1 = xp.sum(xp.where(known_NG, rewards_NG, 0), axis=1, keepdims=True)
    others_NG = (total_N1 - rewards_NG) / xp.maximum(count_N1 - 1, 1)
    return xp.where(known_NG & (count_N1 > 1), rewards_NG - others_NG, 0)


def reinforce_plus_plus(
    rewards_NG: Array, *, baseline: Literal["none", "group"] = "none", eps: float = 1e-8
) -> Array:
    """REINFORCE++ (Hu et al. 2025): rewards whitened over the whole batch, not within groups.

    A = (b - mean of all b) / (standard deviation of all b + eps), b = r, or r less its group's mean
    (`group`, the variant for several completions a prompt). A penalty for leaving the reference
    belongs into the rewards before.

    Args:
        rewards_NG: one a completion; any shape without `group`. A NaN counts for nothing, gets 0.
        baseline: what is taken off first.
        eps: keeps a batch without spread from dividing by 0.

    Returns:
        Advantages, in the shape given; over the batch their mean is 0 and their spread 1.

    Raises:
        ConfigError: an unknown `baseline`, or `group` with groups of one.
    """
    xp = _namespace(rewards_NG)
    known_NG = ~xp.isnan(rewards_NG)
    if baseline == "group":
        _check_groups("reinforce_plus_plus", rewards_NG)
        rewards_NG = rewards_NG - _mean(xp, rewards_NG, known_NG, axis=1)
    elif baseline != "none":
        raise ConfigError(f"baseline={baseline!r} is unknown; use one of: none, group")
    return whiten(xp.where(known_NG, rewards_NG, 0), known_NG, eps=eps)


def whiten(x: Array, mask: Array | None = None, *, shift: bool = True, eps: float = 1e-8) -> Array:
    """Bring values to mean 0 and standard deviation 1 over all that the mask keeps.

    Args:
        x: any shape.
        mask: not 0 for the values that count; the others become 0. None: all.
        shift: False keeps the mean.
        eps: added to the standard deviation (n - 1 in its denominator).

    Returns:
        The values, in their shape.
    """
    xp = _namespace(x)
    counted = xp.ones(x.shape, bool) if mask is None else mask != 0
    mean = _mean(xp, x, counted, axis=None)
    white = (x - mean) / (_deviation(xp, x, counted, axis=None) + eps)
    return xp.where(counted, white if shift else white + mean, 0)


def gae(
    rewards_BT: Array,
    values_BT: Array,
    mask_BT: Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    segment_ids_BT: Array | None = None,
    last_values_B: Array | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al. 2015, equation 16), over written tokens.

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next, where next is the next
    token of the same sequence that the mask keeps: tokens of tools in between are stepped over, and
    a reward given on one of them counts for the written token before it. After the last one V and A
    are 0, or V is `last_values_B`.

    Args:
        rewards_BT: reward given at each token; usually 0 but for the last.
        values_BT: predicted value before each token is written.
        mask_BT: not 0 for the tokens that the model wrote.
        gamma: discount, 0 to 1. Between tokens 1 is usual.
        lam: lambda, 0 (one step, least variance) to 1 (whole returns, no bias).
        segment_ids_BT: the sequences inside packed rows; None: a row is a sequence.
        last_values_B: value after the last token of each row, for rows cut off before their end;
            not together with segments.

    Returns:
        advantages [B, T] and returns = advantages + values [B, T]; 0 outside the mask.

    Raises:
        ConfigError: `gamma` or `lam` out of its range, or both of the last two arguments.

    Example:
        >>> one = np.ones((1, 2))
        >>> gae(np.array([[0.0, 1.0]]), 0 * one, one, lam=0.5)[0]
        array([[0.5, 1. ]])
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"gamma={gamma} and lam={lam} must be between 0 and 1; 1 and 0.95 work")
    if segment_ids_BT is not None and last_values_B is not None:
        raise ConfigError(
            "gae: last_values_B says where rows end and segment_ids_BT where sequences inside rows "
            "do; give one of them"
        )
    xp = _namespace(rewards_BT, values_BT, mask_BT)
    shape = rewards_BT.shape
    values_BT = xp.asarray(values_BT, dtype=xp.result_type(values_BT, np.float32))
    segments_BT = xp.zeros(shape, np.int32) if segment_ids_BT is None else segment_ids_BT
    last_B = xp.zeros(shape[0], values_BT.dtype) if last_values_B is None else last_values_B
    later_BT = xp.concatenate([segments_BT[:, 1:], segments_BT[:, -1:]], axis=1)
    columns = (rewards_BT.T, values_BT.T, (mask_BT != 0).T, (segments_BT == later_BT).T)

    def step(carry: tuple[Array, ...], column: tuple[Array, ...]) -> tuple[Any, Array]:
        value_B, advantage_B, owed_B = carry  # of the next written token; rewards since then
        reward_B, own_value_B, own_B, goes_on_B = column
        value_B, advantage_B, owed_B = (
            xp.where(goes_on_B, kept, 0) for kept in (value_B, advantage_B, owed_B)
        )
        owed_B = owed_B + reward_B
        delta_B = owed_B + gamma * value_B - own_value_B
        found_B = delta_B + gamma * lam * advantage_B
        carry = (
            xp.where(own_B, own_value_B, value_B),
            xp.where(own_B, found_B, advantage_B),
            xp.where(own_B, 0, owed_B),
        )
        return carry, xp.where(own_B, found_B, 0)

    zeros_B = xp.zeros(shape[0], values_BT.dtype)
    advantages_BT = _backwards(xp, step, (xp.asarray(last_B), zeros_B, zeros_B), columns).T
    return advantages_BT, xp.where(mask_BT != 0, advantages_BT + values_BT, 0)


def overlong_penalty(
    lengths: Array, *, max_length: int, buffer: int, penalty: float = 1.0
) -> Array:
    """DAPO's soft overlong punishment (Yu et al. 2025): nothing, then a slope, then all of it.

    0 up to max_length - buffer tokens, -penalty beyond max_length, linear in between.

    Args:
        lengths: of completions in TOKENS, not characters.
        max_length: where the penalty is whole.
        buffer: tokens before that over which it grows, 1 to max_length.
        penalty: its size.

    Returns:
        What to add to the rewards, at most 0, float32 at least.

    Raises:
        ConfigError: numbers out of their ranges.

    Example:
        >>> overlong_penalty(np.array([70, 90, 120]), max_length=100, buffer=20)
        array([-0. , -0.5, -1. ])
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(
            f"overlong_penalty: buffer={buffer} must be between 1 and max_length={max_length}"
        )
    if penalty < 0:
        raise ConfigError(f"overlong_penalty: penalty={penalty} must be 0 or more")
    xp = _namespace(lengths)
    return -penalty * xp.clip((lengths - (max_length - buffer)) / buffer, 0, 1)


def aggregation_weights(
    lengths_N: Array,
    *,
    mode: Literal["sequence_mean", "token_mean", "constant"] = "token_mean",
    max_length: int | None = None,
) -> TokenWeights:
    """How the losses of tokens become one number.

    - `sequence_mean`, GRPO: the mean over sequences of each one's mean over its tokens; tokens of
      long answers weigh less.
    - `token_mean`, DAPO: the mean over all tokens of the batch.
    - `constant`, Dr. GRPO: sums of sequences divided by `max_length`, averaged over sequences.

    Args:
        lengths_N: tokens of each sequence that the loss counts; 0 is allowed.
        mode: which one.
        max_length: of `constant`, which needs it: any fixed number, usually the longest completion.

    Returns:
        Weights of tokens and of the denominator.

    Raises:
        ConfigError: an unknown mode, or `constant` without `max_length`.

    Example:
        >>> aggregation_weights(np.array([2, 4]), mode="sequence_mean").token_N
        array([0.5 , 0.25])
    """
    xp = _namespace(lengths_N)
    ones_N = xp.ones(lengths_N.shape)
    if mode == "sequence_mean":
        return TokenWeights(1 / xp.maximum(lengths_N, 1), ones_N)
    if mode == "token_mean":
        return TokenWeights(ones_N, lengths_N * ones_N)
    if mode != "constant":
        raise ConfigError(
            f"mode={mode!r} is unknown; use one of: sequence_mean, token_mean, constant"
        )
    if max_length is None or max_length < 1:
        raise ConfigError(
            f"aggregation_weights: constant needs max_length, 1 or more, not {max_length}"
        )
    return TokenWeights(ones_N / max_length, ones_N)


def _namespace(*arrays: Array) -> ModuleType:
    if all(isinstance(array, (np.ndarray, np.generic)) for array in arrays):
        return np
    import jax.numpy as jnp  # numpy users need not wait for jax

    return jnp


def _check_groups(name: str, rewards_NG: Array) -> None:
    if rewards_NG.ndim != 2 or rewards_NG.shape[1] < 2:
        raise ConfigError(
            f"{name}: rewards have the shape {rewards_NG.shape}; they must be [prompts, "
            "completions] with 2 completions or more, for they are compared with each other"
        )


def _mean(xp: ModuleType, x: Array, counted: Array, axis: int | None) -> Array:
    total = xp.sum(xp.where(counted, x, 0), axis=axis, keepdims=True)
    return total / xp.maximum(xp.sum(counted, axis=axis, keepdims=True), 1)


def _deviation(xp: ModuleType, x: Array, counted: Array, axis: int | None) -> Array:
    centred = xp.where(counted, x - _mean(xp, x, counted, axis), 0)
    count = xp.sum(counted, axis=axis, keepdims=True)
    return xp.sqrt(xp.sum(centred**2, axis=axis, keepdims=True) / xp.maximum(count - 1, 1))


def _backwards(xp: ModuleType, step: Any, carry: Any, columns: tuple[Array, ...]) -> Array:
    """Run `step` over the columns from last to first and stack what it yields in their order."""
    if xp is not np:
        import jax

        return jax.lax.scan(step, carry, columns, reverse=True)[1]
    found = []
    for column in zip(*(array[::-1] for array in columns), strict=True):
        carry, value = step(carry, column)
        found.append(value)
    return np.stack(found[::-1])
