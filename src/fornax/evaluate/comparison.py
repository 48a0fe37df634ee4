"""Two models on the same prompts: whose completions a judge finds better, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.generative import Answered
from fornax.evaluate.statistics import Estimate, mean, share, sign_test

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The first model against the second.

    Completions are scored one by one, so there is no order for the judge to favour; length it may
    favour, so it is shown.
    """

    prompts: int
    win_rate: Estimate
    """Share of comparisons won, ties counting half; all pairs of a prompt's samples are compared,
    and the interval is over prompts."""
    wins: int
    """Prompts where the first won more pairs than it lost."""
    ties: int
    losses: int
    p_value: float
    """The chance of such a lead between equals (two-sided sign test over prompts)."""
    difference: Estimate
    """Mean difference of the scores."""
    tokens: tuple[float, float]
    """Mean length of either's completions."""
    longer_wins: float
    """Of the decided pairs of unlike length, the share that the longer one won."""


def compare(
    first: Sequence[Answered], second: Sequence[Answered], config: EvaluateConfig
) -> Comparison:
    """Compare two models' answers to the same prompts."""
    rates, differences = [], []
    longer = decided = wins = losses = 0
    for one, other in zip(first, second, strict=True):
        won = lost = 0
        for mine, my_score in zip(one.completions, one.scores, strict=True):
            for yours, your_score in zip(other.completions, other.scores, strict=True):
                won += my_score.total > your_score.total
                lost += my_score.total < your_score.total
                if my_score.total != your_score.total and len(mine) != len(yours):
                    decided += 1
                    longer += (my_score.total > your_score.total) == (len(mine) > len(yours))
        pairs = len(one.scores) * len(other.scores)
        rates.append((won + (pairs - won - lost) / 2) / pairs)
        differences.append(_mean_total(one) - _mean_total(other))
        wins += won > lost
        losses += won < lost
    more = {"confidence": config.confidence, "seed": config.seed}
    return Comparison(
        prompts=len(rates),
        win_rate=share(rates, **more),
        wins=wins,
        ties=len(rates) - wins - losses,
        losses=losses,
        p_value=sign_test(wins, losses),
        difference=mean(differences, **more),
        tokens=(_mean_length(first), _mean_length(second)),
        longer_wins=longer / decided if decided else 0.5,
    )


def _mean_total(answered: Answered) -> float:
    return sum(score.total for score in answered.scores) / len(answered.scores)


def _mean_length(answered: Sequence[Answered]) -> float:
    lengths = [len(completion) for each in answered for completion in each.completions]
    return sum(lengths) / len(lengths)
