"""From judged completions to the rows of a round's optimizer steps.

Legend: R rows, T tokens of a row, n tokens of a completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fornax.tune.advantages import aggregation_weights
from fornax.tune.rl.algorithms import Aggregation
from fornax.tune.rl.credit import Credit
from fornax.tune.rl.rollouts import Collected, Rollout
from fornax.tune.rl.rows import Packed, pack

__all__ = ["Layout", "Round", "Scored", "make_round"]

Rows = dict[str, np.ndarray]
Scored = Mapping[str, list[np.ndarray]]
"""What a pass of the model says of each completion: name to one float32 [n] a completion."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rounds become rows."""

    length: int
    """Slots of a row."""
    counts: tuple[int, ...]
    """Row counts allowed."""
    mini_batches: int
    epochs: int
    aggregation: Aggregation
    max_tokens: int
    """Of a completion: the constant of `aggregation: constant`."""
    seed: int
    mask_truncated: bool = False
    """Give completions that ran out of tokens no weight."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The rows of each mini-batch, and in which order they are trained on."""

    steps: list[Rows]
    order: list[int]
    credit: Credit
    numbers: dict[str, float] = field(default_factory=dict)
    """What the pass over the rows says of the round."""


def make_round(
    collected: Collected,
    layout: Layout,
    score: Callable[[Rows], Mapping[str, np.ndarray]] | None,
    credit: Callable[[Sequence[Rollout], Scored], Credit],
) -> Round:
    """Divide a round into mini-batches, pack each, and fill in what the loss needs.

    Completions that failed are in none. A mini-batch is packed once: the pass that scores it and
    every epoch see the same rows, so that a ratio differs from 1 only by what was learned.

    Args:
      collected: the completions.
      layout: shapes and weights.
      score: a mini-batch's rows to arrays [R, T], which become rows of the same name; None: the
        loss needs none.
      credit: (completions, what the pass says of each) to advantages.
    """
    rollouts = collected.rollouts
    draw = np.random.default_rng([layout.seed, 11, collected.number])
    whole = np.flatnonzero([not r.failed for r in rollouts])
    parts = np.array_split(draw.permutation(whole), layout.mini_batches)
    packs = [_pack([rollouts[i] for i in part], layout) for part in parts]
    extra = [dict(score(p.rows)) if score is not None else {} for p in packs]
    scored = _by_rollout(rollouts, parts, packs, extra)
    given = credit(rollouts, scored)
    steps = [
        {**packed.rows, **more, **_filled(packed, part, given, rollouts, layout)}
        for part, packed, more in zip(parts, packs, extra, strict=True)
    ]
    order = [int(i) for _ in range(layout.epochs) for i in draw.permutation(layout.mini_batches)]
    # With few completions a mini-batch may be empty; a round without any is one step, skipped.
    order = [i for i in order if steps[i]["sequence_weights"].any()] or order[:1]
    return Round(
        steps=steps, order=order, credit=given, numbers=_figures(rollouts, scored) | given.numbers
    )


def _figures(rollouts: Sequence[Rollout], scored: Scored) -> dict[str, float]:
    """How far policy and sampler lie from each other and from the reference, on drawn tokens."""
    whole = sum(not r.failed for r in rollouts)
    if not ("old_logps" in scored and "ref_logps" in scored and whole):
        return {}
    drawn = np.concatenate([r.learned for r in rollouts]).astype(bool)
    old, ref = (np.concatenate(scored[name])[drawn] for name in ("old_logps", "ref_logps"))
    per_completion = float(np.sum(old - ref)) / whole
    return {"kl_reference": float(np.mean(old - ref)), "kl_reference_sum": per_completion}


def _pack(rollouts: Sequence[Rollout], layout: Layout) -> Packed:
    return pack(rollouts, length=layout.length, counts=layout.counts)


def _by_rollout(
    rollouts: Sequence[Rollout],
    parts: Sequence[np.ndarray],
    packs: Sequence[Packed],
    extra: Sequence[Mapping[str, np.ndarray]],
) -> Scored:
    """Each array, cut into one [n] a completion; zeros for those that are in no mini-batch."""
    found = {
        name: [np.zeros(len(r.tokens), np.float32) for r in rollouts]
        for name in (extra[0] if extra else ())
    }
    for part, packed, more in zip(parts, packs, extra, strict=True):
        for name, array_RT in more.items():
            for place, i in enumerate(part):
                found[name][i] = packed.read(array_RT, place)
    return found


def _filled(
    packed: Packed,
    part: np.ndarray,
    credit: Credit,
    rollouts: Sequence[Rollout],
    layout: Layout,
) -> Rows:
    """Advantages (and returns), and the weights of tokens and of the whole."""
    chosen = [rollouts[i] for i in part]
    counts = [not (layout.mask_truncated and r.truncated) and r.drawn > 0 for r in chosen]
    weights = aggregation_weights(
        np.array([r.drawn for r, c in zip(chosen, counts, strict=True) if c]),
        mode=layout.aggregation,
        max_length=layout.max_tokens,
    )
    token = np.zeros(len(chosen), np.float32)
    normaliser = np.zeros(len(chosen), np.float32)
    token[counts], normaliser[counts] = weights.token_N, weights.normaliser_N
    per_row = np.zeros(packed.rows["tokens"].shape[0], np.float32)
    np.add.at(per_row, [place.row for place in packed.places], normaliser)
    rows = {
        "advantages": packed.fill([credit.advantages[i] for i in part]),
        "token_weights": packed.fill(token.tolist()) * packed.rows["loss_mask"],
        "sequence_weights": per_row,
    }
    if layout.mask_truncated:
        rows["loss_mask"] = packed.rows["loss_mask"] * (rows["token_weights"] > 0)
    if credit.returns is not None:
        rows["returns"] = packed.fill([credit.returns[i] for i in part])
    return rows
