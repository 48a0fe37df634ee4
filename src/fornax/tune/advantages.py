"""What each completion or token was worth: advantages, penalties, and the weights of tokens.

NumPy on the host: rewards arrive there, and completions have lengths that a compiler would see
again in every round.

Legend: N prompts, G completions of a prompt (a group), B rows, T tokens of a row.
"""

from typing import Literal, NamedTuple

import numpy as np

from fornax.config.errors import ConfigError

__all__ = [
    "aggregation_weights",
    "gae",
    "group_relative",
    "leave_one_out",
    "overlong_penalty",
    "reinforce_plus_plus",
    "whiten",
]


class TokenWeights(NamedTuple):
    """How a batch's loss is put together: sum(token weight * loss) / sum(normaliser).

    Both sums add up over micro-batches, so accumulation is exact.
    """

    token_N: np.ndarray
    """The weight of each token of sequence n."""
    normaliser_N: np.ndarray
    """What sequence n adds to the denominator."""


def group_relative(
    rewards_NG: np.ndarray,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> np.ndarray:
    """GRPO's advantages (Shao et al. 2024, section 4.1.2): rewards against their group's mean.

    A = (r - mean of the group) / (s + eps), s the standard deviation (n - 1 in its denominator) of
    the group, of the whole batch (`batch`; Hu et al. 2025), or A = r - mean (`none`, Dr. GRPO; Liu
    et al. 2025: dividing favours prompts that are nearly always, or never, solved).

    Args:
        rewards_NG: one per completion. A NaN (no reward) is left out of mean and deviation and gets
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
    known_NG = ~np.isnan(rewards_NG)
    centred_NG = rewards_NG - _mean(rewards_NG, known_NG, axis=1)
    if scale == "none":
        return np.where(known_NG, centred_NG, 0)
    if scale == "group":
        deviation = _deviation(rewards_NG, known_NG, axis=1)
    elif scale == "batch":
        deviation = _deviation(rewards_NG, known_NG, axis=None)
    else:
        raise ConfigError(f"scale={scale!r} is unknown; use one of: group, batch, none")
    return np.where(known_NG, centred_NG / (deviation + eps), 0)


def leave_one_out(rewards_NG: np.ndarray) -> np.ndarray:
    """RLOO's advantages (Ahmadian et al. 2024): each reward less the mean of the OTHERS' rewards.

    A_i = r_i - mean of r_j over j != i = G / (G - 1) (r_i - mean r). The baseline does not depend
    on its own sample, so the gradient stays unbiased.

    Args:
        rewards_NG: one per completion; a NaN counts for nobody and gets 0.

    Returns:
        Advantages [N, G].

    Raises:
        ConfigError: a group of one.

    Example:
        >>> leave_one_out(np.array([[3.0, 0.0, 0.0]]))
        array([[ 3. , -1.5, -1.5]])
    """
    _check_groups("leave_one_out", rewards_NG)
    known_NG = ~np.isnan(rewards_NG)
    count_N1 = np.sum(known_NG, axis=1, keepdims=True)
    total_N1 = np.sum(np.where(known_NG, rewards_NG, 0), axis=1, keepdims=True)
    others_NG = (total_N1 - rewards_NG) / np.maximum(count_N1 - 1, 1)
    return np.where(known_NG & (count_N1 > 1), rewards_NG - others_NG, 0)


def reinforce_plus_plus(
    rewards_NG: np.ndarray, *, baseline: Literal["none", "group"] = "none", eps: float = 1e-8
) -> np.ndarray:
    """REINFORCE++ (Hu et al. 2025): rewards whitened over the whole batch, not within groups.

    A = (b - mean of all b) / (standard deviation of all b + eps), b = r, or r less its group's mean
    (`group`, the variant for several completions a prompt). A penalty for leaving the reference
    belongs into the rewards before.

    Args:
        rewards_NG: one per completion; any shape without `group`. A NaN is not counted and gets 0.
        baseline: what is taken off first.
        eps: keeps a batch without spread from dividing by 0.

    Returns:
        Advantages, in the shape given; over the batch their mean is 0 and their spread 1.

    Raises:
        ConfigError: an unknown `baseline`, or `group` with groups of one.
    """
    known_NG = ~np.isnan(rewards_NG)
    if baseline == "group":
        _check_groups("reinforce_plus_plus", rewards_NG)
        rewards_NG = rewards_NG - _mean(rewards_NG, known_NG, axis=1)
    elif baseline != "none":
        raise ConfigError(f"baseline={baseline!r} is unknown; use one of: none, group")
    return whiten(np.where(known_NG, rewards_NG, 0), known_NG, eps=eps)


def whiten(
    x: np.ndarray, mask: np.ndarray | None = None, *, shift: bool = True, eps: float = 1e-8
) -> np.ndarray:
    """Bring values to mean 0 and standard deviation 1 over all that the mask keeps.

    Args:
        x: any shape.
        mask: not 0 for the values that count; the others become 0. None: all.
        shift: False keeps the mean.
        eps: added to the standard deviation (n - 1 in its denominator).

    Returns:
        The values, in their shape.
    """
    counted = np.ones(x.shape, bool) if mask is None else mask != 0
    mean = _mean(x, counted, axis=None)
    white = (x - mean) / (_deviation(x, counted, axis=None) + eps)
    return np.where(counted, white if shift else white + mean, 0)


def gae(
    rewards_BT: np.ndarray,
    values_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2015, equation 16), over written tokens.

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next, where next is the next
    token of the same sequence that the mask keeps: tokens of tools in between are stepped over, and
    a reward given on one of them counts for the written token before it. After the last one V and A
    are 0.

    Args:
        rewards_BT: reward given at each token; usually 0 but for the last.
        values_BT: predicted value before each token is written.
        mask_BT: not 0 for the tokens that the model wrote.
        gamma: discount, 0 to 1. Between tokens 1 is usual.
        lam: lambda, 0 (one step, least variance) to 1 (whole returns, no bias).

    Returns:
        advantages [B, T] and returns = advantages + values [B, T]; 0 outside the mask.

    Raises:
        ConfigError: `gamma` or `lam` out of its range.

    Example:
        >>> one = np.ones((1, 2))
        >>> gae(np.array([[0.0, 1.0]]), 0 * one, one, lam=0.5)[0]
        array([[0.5, 1. ]])
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"gamma={gamma} and lam={lam} must be between 0 and 1; 1 and 0.95 work")
    values_BT = np.asarray(values_BT, dtype=np.result_type(values_BT, np.float32))
    written_BT = mask_BT != 0
    advantages_BT = np.zeros(values_BT.shape, np.result_type(values_BT, rewards_BT))
    # Of the next written token, and the reward since then.
    value_B, advantage_B, owed_B = np.zeros((3, len(values_BT)), values_BT.dtype)
    for place in reversed(range(values_BT.shape[1])):
        own_B, own_value_B = written_BT[:, place], values_BT[:, place]
        owed_B = owed_B + rewards_BT[:, place]
        found_B = owed_B + gamma * value_B - own_value_B + gamma * lam * advantage_B
        value_B = np.where(own_B, own_value_B, value_B)
        advantage_B = np.where(own_B, found_B, advantage_B)
        owed_B = np.where(own_B, 0, owed_B)
        advantages_BT[:, place] = np.where(own_B, found_B, 0)
    return advantages_BT, np.where(written_BT, advantages_BT + values_BT, 0)


def overlong_penalty(
    lengths: np.ndarray, *, max_length: int, buffer: int, penalty: float = 1.0
) -> np.ndarray:
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
    return -penalty * np.clip((lengths - (max_length - buffer)) / buffer, 0, 1)


def aggregation_weights(
    lengths_N: np.ndarray,
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
    ones_N = np.ones(lengths_N.shape)
    if mode == "sequence_mean":
        return TokenWeights(1 / np.maximum(lengths_N, 1), ones_N)
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


def _check_groups(name: str, rewards_NG: np.ndarray) -> None:
    if rewards_NG.ndim != 2 or rewards_NG.shape[1] < 2:
        raise ConfigError(
            f"{name}: rewards have the shape {rewards_NG.shape}; they must be [prompts, "
            "completions] with 2 completions or more, for they are compared with each other"
        )


def _mean(x: np.ndarray, counted: np.ndarray, axis: int | None) -> np.ndarray:
    total = np.sum(np.where(counted, x, 0), axis=axis, keepdims=True)
    return total / np.maximum(np.sum(counted, axis=axis, keepdims=True), 1)


def _deviation(x: np.ndarray, counted: np.ndarray, axis: int | None) -> np.ndarray:
    centred = np.where(counted, x - _mean(x, counted, axis), 0)
    count = np.sum(counted, axis=axis, keepdims=True)
    return np.sqrt(np.sum(centred**2, axis=axis, keepdims=True) / np.maximum(count - 1, 1))
