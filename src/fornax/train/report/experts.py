"""How a report shows what the routers of a mixture of experts did."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fornax.pages import Section, grid, lines, series, thin

__all__ = ["experts_section"]

_CURVES = (
    ("Load of an expert over the mean of its layer", ("expert_load_max", "expert_load_min")),
    ("Balance loss", ("balance_loss",)),
    ("Entropy of a token's scores, nats", ("router_entropy",)),
    ("Router z-loss", ("router_z_loss",)),
)
_DROPPED = ("Share of tokens' choices that were dropped", ("expert_dropped",))


def experts_section(records: Sequence[Mapping[str, Any]]) -> Section | None:
    """The load of each expert, and the routers' losses over steps; None for a model without."""
    counted = [record for record in records if "expert_tokens" in record]
    if not counted:
        return None
    tokens_LE = counted[-1]["expert_tokens"]
    means = [sum(tokens_E) / len(tokens_E) or 1.0 for tokens_E in tokens_LE]
    load_LE = [
        [tokens / mean for tokens in tokens_E]
        for tokens_E, mean in zip(tokens_LE, means, strict=True)
    ]
    dropped_LE = counted[-1].get("expert_tokens_dropped")
    curves = [
        lines(title, [(name.rpartition("_")[2], *thin(*series(records, name))) for name in names])
        for title, names in (_CURVES if dropped_LE is None else (*_CURVES, _DROPPED))
    ]
    last = grid(
        f"Tokens of each expert at step {counted[-1]['step']}",
        load_LE,
        rows="layer with experts",
        columns="expert",
        unit="over the layer's mean",
    )
    if dropped_LE is not None:
        last += grid(
            f"Tokens of each expert that it had no room for at step {counted[-1]['step']}",
            [
                [dropped / (tokens or 1.0) for tokens, dropped in zip(*both, strict=True)]
                for both in zip(tokens_LE, dropped_LE, strict=True)
            ],
            rows="layer with experts",
            columns="expert",
            unit="share of its tokens",
            shares=True,
        )
    idle = sum(load == 0 for load_E in load_LE for load in load_E)
    said = f"{idle} of {sum(map(len, load_LE))} experts had no token in the last step shown."
    if dropped_LE is not None:
        share = sum(map(sum, dropped_LE)) / (sum(map(sum, tokens_LE)) or 1.0)
        said += f" They had no room for {share:.1%} of what tokens chose."
    return Section(
        title="Experts",
        lead=f"Blue experts got fewer tokens than the mean of their layer, red ones more. {said}",
        body=last + Markup('<div class="plots">') + Markup("").join(curves) + Markup("</div>"),
    )
