"""What people watch of post-training: rewards, divergences, ratios, lengths, margins, by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fornax.pages import Section, lines, series, thin

__all__ = ["tuning_figures", "tuning_section"]

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Curves that belong together; those that a run does not have are left out."""

    title: str
    curves: tuple[tuple[str, str], ...]
    """(label, metric) pairs."""
    unit: str = ""
    from_zero: bool = False


_PICTURES = (
    Picture(
        title="Reward",
        curves=(("mean", "reward"), ("largest", "reward_max"), ("least", "reward_min")),
    ),
    Picture(title="Spread of rewards in a group", curves=(("", "reward_std"),), from_zero=True),
    Picture(
        title="Divergence",
        curves=(
            ("from the reference", "kl"),
            ("from the reference, of the round", "kl_reference"),
            ("from the policy of the round", "approx_kl"),
            ("sampler and trainer", "mismatch_kl"),
        ),
        unit="nats per token",
    ),
    Picture(title="Entropy", curves=(("", "entropy"),), unit="nats per token", from_zero=True),
    Picture(title="Importance ratio", curves=(("mean", "ratio_mean"), ("largest", "ratio_max"))),
    Picture(
        title="Clipped tokens",
        curves=(("policy", "clip_fraction"), ("value", "value_clip_fraction")),
        unit="share",
        from_zero=True,
    ),
    Picture(
        title="Length of completions",
        curves=(("mean", "completion_tokens"), ("largest", "completion_tokens_max")),
        unit="tokens",
        from_zero=True,
    ),
    Picture(
        title="Without use",
        curves=(
            ("truncated completions", "truncated"),
            ("groups with one reward", "zero_variance_groups"),
        ),
        unit="share",
        from_zero=True,
    ),
    Picture(
        title="Speed",
        curves=(
            ("rollout", "rollout_tokens_per_second"),
            ("training", "train_tokens_per_second"),
        ),
        unit="tokens/s",
        from_zero=True,
    ),
    Picture(title="Failed calls of reward functions", curves=(("", "reward_failures"),)),
    Picture(title="Steps behind the newest weights", curves=(("", "staleness"),), from_zero=True),
    Picture(title="Value loss", curves=(("", "value_loss"),), from_zero=True),
    Picture(
        title="Margin of rewards",
        curves=(("train", "reward_margin"), ("held out", "eval/reward_margin")),
    ),
    Picture(
        title="Rewards of both sides",
        curves=(
            ("chosen", "reward_chosen"),
            ("rejected", "reward_rejected"),
            ("desirable", "reward_desirable"),
            ("undesirable", "reward_undesirable"),
        ),
    ),
    Picture(
        title="Accuracy",
        curves=(("train", "accuracy"), ("held out", "eval/accuracy")),
        unit="share",
    ),
    Picture(
        title="Log-likelihood of both sides",
        curves=(("chosen", "logps_chosen"), ("rejected", "logps_rejected")),
        unit="nats",
    ),
    Picture(title="Likelihood lost by completions", curves=(("", "drift"),), unit="nats per token"),
    Picture(
        title="Divergence from the teacher",
        curves=(("train", "divergence"), ("held out", "eval/divergence")),
        unit="nats per token",
    ),
    Picture(
        title="Tokens that teacher and student like best",
        curves=(("train", "agreement"), ("held out", "eval/agreement")),
        unit="share alike",
    ),
)

_SHARES = ("accuracy", "eval/accuracy", "clip_fraction", "staleness")
"""Metrics of other runs too: alone they make no section."""


def tuning_section(records: Records) -> Section | None:
    """Curves of what post-training watches; None for a run that has none of it."""
    found = {name for record in records for name in record}
    own = {name for picture in _PICTURES for _, name in picture.curves} - {*_SHARES}
    if not own & found:
        return None
    drawn = [
        _draw(picture, records) for picture in (*_PICTURES[:1], *_sources(found), *_PICTURES[1:])
    ]
    body = Markup("").join(each for each in drawn if each)
    return Section(
        title="Post-training",
        lead=_lead(found),
        body=Markup('<div class="plots">{}</div>').format(body),
    )


def tuning_figures(records: Records) -> list[tuple[str, str]]:
    """Such a run at a glance."""
    figures = []
    if rewards := series(records, "reward")[1]:
        figures += [
            ("reward at the start", f"{rewards[0]:.3g}"),
            ("reward at the end", f"{rewards[-1]:.3g}"),
        ]
    for label, prefix in (("", ""), ("held-out ", "eval/")):
        margins, right = (
            series(records, f"{prefix}{name}")[1] for name in ("reward_margin", "accuracy")
        )
        if margins and right:
            figures += [
                (f"{label}margin of rewards", f"{margins[-1]:.3g}"),
                (f"{label}accuracy", f"{right[-1]:.0%}"),
            ]
    return figures


def _sources(found: set[str]) -> list[Picture]:
    names = sorted(name for name in found if name.startswith("reward/"))
    if not names:
        return []
    curves = tuple((name.removeprefix("reward/"), name) for name in names)
    title = "Reward by source" if len(names) > 1 else f"Reward by source: {curves[0][0]}"
    return [Picture(title=title, curves=curves)]


def _draw(picture: Picture, records: Records) -> Markup:
    curves = [(label, *thin(*series(records, name))) for label, name in picture.curves]
    curves = [curve for curve in curves if curve[1]]
    if not curves or _silent(picture, curves):
        return Markup()
    alone = len(curves) == 1 < len(picture.curves) and curves[0][0] not in ("mean", "train")
    title = f"{picture.title}: {curves[0][0]}" if alone else picture.title
    return lines(title, curves, unit=picture.unit, from_zero=picture.from_zero)


def _silent(
    picture: Picture, curves: Sequence[tuple[str, Sequence[float], Sequence[float]]]
) -> bool:
    """Whether there is nothing to see: failures and staleness that never were."""
    quiet = picture.curves[0][1] in ("reward_failures", "staleness")
    return quiet and not any(value for _, _, values in curves for value in values)


def _lead(found: set[str]) -> str:
    if "reward" in found:
        return (
            "Reward should rise while entropy, lengths and the share of truncated completions stay "
            "sane; a divergence between sampler and trainer above a hundredth of a nat, or ratios "
            "far from 1, mean that the two do not work with the same numbers."
        )
    if "reward_margin" in found or "reward_desirable" in found:
        return (
            "Margins and accuracy should rise; where the likelihood of chosen answers falls with "
            "that of rejected ones, lower the learning rate or raise beta."
        )
    return "The numbers that belong to this method, over the steps of training."
