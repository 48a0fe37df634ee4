"""What a plan costs at the user's own price of a chip."""

import dataclasses

from fornax.config.price import Price
from fornax.plan.facts import Hardware, Money, Plan, Run, Speed
from fornax.plan.serving_facts import DecodeLatency, LargestBatch, PromptLatency, ServePlan

__all__ = ["cost", "priced", "priced_serving"]

_DAY = 86_400


def cost(price: Price, hardware: Hardware, run: Run, speed: Speed) -> Money:
    """What training costs."""
    per_day = price.chip_hour * 24 * hardware.chips
    days = None if run.steps is None else run.steps * speed.step_seconds / _DAY
    return Money(
        currency=price.currency,
        per_chip_hour=price.chip_hour,
        per_day=per_day,
        per_billion_tokens=per_day / speed.tokens_per_day * 1e9,
        whole_run=None if days is None else per_day * days,
        days=days,
    )


def priced(plan: Plan, price: Price) -> Plan:
    """The plan with what training costs; one that is not of a training run stays as it is."""
    if plan.run is None or plan.speed is None:
        return plan
    return dataclasses.replace(plan, money=cost(price, plan.hardware, plan.run, plan.speed))


def priced_serving(plan: ServePlan, price: Price) -> ServePlan:
    """The plan with what a million tokens cost at each of its rates: output tokens while all
    sequences decode, and prompt tokens while one prompt is read."""

    return dataclasses.replace(
        plan,
        price=price,
        decode=tuple(
            dataclasses.replace(p, per_million_tokens=_per_million(price, p)) for p in plan.decode
        ),
        prompts=tuple(
            dataclasses.replace(p, per_million_tokens=_per_million(price, p)) for p in plan.prompts
        ),
        largest=tuple(
            dataclasses.replace(p, per_million_tokens=_per_million(price, p)) for p in plan.largest
        ),
    )


def _per_million(price: Price, point: DecodeLatency | PromptLatency | LargestBatch) -> float | None:
    rate = point.tokens_per_second_per_chip
    return price.chip_hour / 3600 / rate * 1e6 if rate else None
