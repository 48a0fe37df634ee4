"""A round of completions that an engine draws, as reinforcement learning does: time and work."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from fornax.hlo import calibration_of
from fornax.plan.serving.engine import Engine
from fornax.plan.serving.memory import cache_holds
from fornax.plan.serving.times import StepTime, step_times
from fornax.plan.serving.work import attention_of


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A round of one engine, its completions all of the same length."""

    time: StepTime
    """Of all steps."""
    flops: float
    """Of a device."""
    bytes: float
    at_once: int
    """Sequences that decode together."""
    steps: int
    """That decode."""


def draw_round(
    engine: Engine, *, prompts: int, group: int, prompt_tokens: int, new_tokens: int
) -> Drawing:
    """Draw `group` completions of each prompt, in closed form.

    A prompt is read once, for all its completions. They decode together, as many as there is cache
    for, and the next begin when these are done.

    Args:
      engine: as shapes.
      prompts: of this engine.
      group: completions of each.
      prompt_tokens: of each prompt.
      new_tokens: of each completion.
    """
    attention = functools.cache(functools.partial(attention_of, engine))
    times = step_times(engine, {}, calibration_of(engine.topology.chip), attention)
    sizes, middle = times.sizes, prompt_tokens + new_tokens // 2
    at_once = min(prompts * group, max(1, cache_holds(engine, prompt_tokens + new_tokens)))
    total, reading = times.prompts(prompts, prompt_tokens)
    tokens = prompts * prompt_tokens
    flops = 2.0 * (tokens * sizes.token_products + prompts * sizes.head_products)
    read = prompts * attention(min(prompt_tokens, times.steps[-1])).prompt(0, prompt_tokens).flops
    moved = reading * sizes.weight_bytes(times.steps[-1])
    count = 0
    for batch in _waves(prompts * group, at_once):
        work = attention(batch).decode(batch, middle)
        each = 2.0 * batch * (sizes.token_products + sizes.head_products) + work.flops
        total += times.decode(batch, middle) * new_tokens
        flops += new_tokens * each
        moved += new_tokens * (sizes.weight_bytes(batch) + sizes.head_bytes + work.bytes)
        count += new_tokens
    return Drawing(time=total, flops=flops + read, bytes=moved, at_once=at_once, steps=count)


def _waves(completions: int, at_once: int) -> Iterator[int]:
    """How many decode together, one wave after the other."""
    while completions:
        batch = min(completions, at_once)
        yield batch
        completions -= batch
