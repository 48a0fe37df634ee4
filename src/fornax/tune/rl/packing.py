"""From scored completions to the rows of a round's optimizer steps, in few fixed shapes.

Legend: R rows, T tokens of a row, n tokens of a completion (the prompt's are not counted), L layers
with experts, k experts per token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fornax.config.errors import EngineError
from fornax.tune.advantages import aggregation_weights
from fornax.tune.config import Aggregation
from fornax.tune.rl.credit import Credit
from fornax.tune.rl.forward import ROUTED
from fornax.tune.rl.rollouts import Rollout, RolloutBatch

__all__ = [
    "Layout",
    "Round",
    "RoutedShape",
    "Scored",
    "make_round",
    "pack",
    "row_counts",
]


class RoutedShape(NamedTuple):
    """How the experts of a token are written down."""

    layers: int
    """L."""
    experts_per_token: int
    """k."""
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sequence is: its slot `start + i` holds token i and is to predict token i + 1."""

    row: int
    start: int
    prompt: int
    """Tokens of the prompt."""
    completion: int
    """Tokens after the prompt."""

    @property
    def span(self) -> slice:
        """The slots whose targets are the completion's tokens."""
        first = self.start + self.prompt - 1
        return slice(first, first + self.completion)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The rows of one optimizer step before any loss: arrays [R, T], and where what lies."""

    rows: dict[str, np.ndarray]
    """tokens, targets, segment_ids, positions int32; loss_mask, sampler_logps float32; perhaps
    routed_experts [R, T, L, k], -1 where there is no token or its experts are not known."""
    places: tuple[Place, ...]
    """One for each sequence, in the order given."""

    def read(self, array_RT: np.ndarray, number: int) -> np.ndarray:
        """The [n] values of sequence `number`, one for each token of its completion."""
        place = self.places[number]
        return array_RT[place.row, place.span]

    def fill(self, values: Sequence[np.ndarray | float]) -> np.ndarray:
        """float32 [R, T] with each sequence's value, or its [n] values, on its completion."""
        filled = np.zeros(self.rows["tokens"].shape, np.float32)
        for place, value in zip(self.places, values, strict=True):
            filled[place.row, place.span] = value
        return filled


def row_counts(most: int, unit: int) -> tuple[int, ...]:
    """The row counts that steps may have: all, a half and a quarter, in multiples of `unit`.

    Args:
      most: sequences of a step: each has a row of its own at worst.
      unit: what a row count divides by, data shards times micro-batches.
    """
    return tuple(sorted({-(-most // (part * unit)) * unit for part in (1, 2, 4)}))


def pack(
    rollouts: Sequence[Rollout],
    *,
    length: int,
    counts: Sequence[int],
    routed: RoutedShape | None = None,
) -> Packed:
    """Put sequences into the fewest rows that longest-first fitting finds.

    The number of rows is rounded up to one of `counts`, so that few programs are compiled. A
    sequence takes one slot less than it has tokens: its last token is only a target.

    Args:
      rollouts: the sequences; each takes at most `length` slots.
      length: slots of a row.
      counts: row counts allowed, rising; the last is enough for one sequence per row.
      routed: of the experts that tokens took, for rows that have them.

    Raises:
      EngineError: a sequence that comes without its experts, or with those of another model.
    """
    spots = _fit([r.length - 1 for r in rollouts], length)
    used = 1 + max((row for row, _ in spots), default=-1)
    shape = (next(count for count in counts if count >= used), length)
    rows: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "targets", "segment_ids", "positions")
    }
    rows |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "sampler_logps")}
    if routed is not None:
        rows[ROUTED] = np.full((*shape, *routed[:2]), -1, routed.dtype)
    segments = np.zeros(shape[0], np.int32)
    places = []
    for rollout, (row, start) in zip(rollouts, spots, strict=True):
        slots = slice(start, start + rollout.length - 1)
        sequence = rollout.sequence
        segments[row] += 1
        rows["tokens"][row, slots] = sequence[:-1]
        rows["targets"][row, slots] = sequence[1:]
        rows["segment_ids"][row, slots] = segments[row]
        rows["positions"][row, slots] = np.arange(len(sequence) - 1)
        if routed is not None:
            rows[ROUTED][row, slots] = _routed(rollout, routed)
        place = Place(
            row=row, start=start, prompt=len(rollout.prompt), completion=len(rollout.tokens)
        )
        rows["loss_mask"][row, place.span] = rollout.mask
        rows["sampler_logps"][row, place.span] = np.where(rollout.mask, rollout.logprobs, 0)
        places.append(place)
    return Packed(rows=rows, places=tuple(places))


def _routed(rollout: Rollout, shape: RoutedShape) -> np.ndarray:
    """The experts of a sequence, but of its last token."""
    found, wanted = rollout.routed_experts, (rollout.length - 1, *shape[:2])
    if found is None or found.shape != wanted:
        has = "no experts" if found is None else f"experts of shape {found.shape}"
        raise EngineError(
            f"routing_replay: a completion of {rollout.where} came with {has}, and the trainer's "
            f"model needs {wanted}; let the sampler return them (LLMSampler with "
            "enable_return_routed_experts), or turn routing_replay off"
        )
    return found


def _fit(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """(row, start) of each length: the longest first, each into the first row with room."""
    spots = [(0, 0)] * len(lengths)
    used: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        size = lengths[number]
        row = next((r for r, taken in enumerate(used) if taken + size <= capacity), len(used))
        if row == len(used):
            used.append(0)
        spots[number] = (row, used[row])
        used[row] += size
    return spots


Rows = dict[str, np.ndarray]
Scored = Mapping[str, list[np.ndarray]]
"""Per-token outputs of a forward pass for each completion: name to one float32 [n] a completion."""


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
    skip_zero_advantage: bool = False
    """Put completions without advantage in no row; nothing may have to be scored."""
    routed: RoutedShape | None = None
    """Let the rows have the experts that tokens took; None: they do not."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The rows of each mini-batch, and in which order they are trained on."""

    steps: list[Rows]
    order: list[int]
    credit: Credit
    numbers: dict[str, float] = field(default_factory=dict)
    """Metrics of the round from that pass."""


def make_round(
    collected: RolloutBatch,
    layout: Layout,
    score: Callable[[Rows], Mapping[str, np.ndarray]] | None,
    credit: Callable[[Sequence[Rollout], Scored], Credit],
) -> Round:
    """Divide a round into mini-batches, pack each, and fill in what the loss needs.

    Completions that failed are in none; with `skip_zero_advantage` neither are those without
    advantage, unless none of the mini-batch has any, but the loss is divided as if. A mini-batch is
    packed once: the pass that scores it and every epoch see the same rows, so that a ratio differs
    from 1 only by what was learned.

    Args:
      collected: the completions.
      layout: shapes and weights.
      score: a mini-batch's rows to arrays [R, T], which become rows of the same name; None: the
        loss needs none.
      credit: (completions, the pass's outputs for each) to advantages.
    """
    rollouts = collected.rollouts
    draw = np.random.default_rng([layout.seed, 11, collected.number])
    whole = np.flatnonzero([not r.failed for r in rollouts])
    parts = np.array_split(draw.permutation(whole), layout.mini_batches)
    laid = parts
    if layout.skip_zero_advantage:
        advantages = credit(rollouts, {}).advantages
        laid = [_with_advantage(part, advantages) for part in parts]
    packs = [_pack_rows([rollouts[i] for i in part], layout) for part in laid]
    extra = [dict(score(p.rows)) if score is not None else {} for p in packs]
    scored = _by_rollout(rollouts, laid, packs, extra)
    given = credit(rollouts, scored)
    steps = [
        {**packed.rows, **more, **_filled(packed, inside, part, given, rollouts, layout)}
        for part, inside, packed, more in zip(parts, laid, packs, extra, strict=True)
    ]
    order = [int(i) for _ in range(layout.epochs) for i in draw.permutation(layout.mini_batches)]
    # With few completions a mini-batch may be empty; a round without any is one step, skipped.
    order = [i for i in order if steps[i]["sequence_weights"].any()] or order[:1]
    return Round(
        steps=steps, order=order, credit=given, numbers=_figures(rollouts, scored) | given.numbers
    )


def _with_advantage(part: np.ndarray, advantages: Sequence[np.ndarray]) -> np.ndarray:
    """The completions whose advantage is more than the rounding of a mean; all if none has any."""
    some = [bool(np.any(np.abs(advantages[i]) > 1e-6)) for i in part]
    return part[some] if any(some) else part


def _figures(rollouts: Sequence[Rollout], scored: Scored) -> dict[str, float]:
    """How far policy and sampler lie from each other and from the reference, on drawn tokens."""
    whole = sum(not r.failed for r in rollouts)
    if not ("old_logps" in scored and "ref_logps" in scored and whole):
        return {}
    drawn = np.concatenate([r.learned for r in rollouts]).astype(bool)
    old, ref = (np.concatenate(scored[name])[drawn] for name in ("old_logps", "ref_logps"))
    per_completion = float(np.sum(old - ref)) / whole
    return {"kl_reference": float(np.mean(old - ref)), "kl_reference_sum": per_completion}


def _pack_rows(rollouts: Sequence[Rollout], layout: Layout) -> Packed:
    return pack(rollouts, length=layout.length, counts=layout.counts, routed=layout.routed)


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
    inside: np.ndarray,
    part: np.ndarray,
    credit: Credit,
    rollouts: Sequence[Rollout],
    layout: Layout,
) -> Rows:
    """Advantages (and returns), and the weights of tokens and of the whole.

    Args:
      packed: the rows of the completions `inside`.
      inside: those of the mini-batch that lie in rows.
      part: all of the mini-batch, which the loss is divided by.
      credit: advantages of all completions of the round.
      rollouts: these.
      layout: how tokens are weighed.
    """
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
    laid = np.isin(part, inside)
    per_row = np.zeros(packed.rows["tokens"].shape[0], np.float32)
    np.add.at(per_row, [place.row for place in packed.places], normaliser[laid])
    per_row[0] += normaliser[~laid].sum()
    rows = {
        "advantages": packed.fill([credit.advantages[i] for i in inside]),
        "token_weights": packed.fill(token[laid].tolist()) * packed.rows["loss_mask"],
        "sequence_weights": per_row,
    }
    if layout.mask_truncated:
        rows["loss_mask"] = packed.rows["loss_mask"] * (rows["token_weights"] > 0)
    if credit.returns is not None:
        rows["returns"] = packed.fill([credit.returns[i] for i in inside])
    return rows
