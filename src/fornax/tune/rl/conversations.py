"""Completions of several turns: prompts answered in talk with an environment or with tools."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from fornax.config.errors import ConfigError
from fornax.tune.data import Codec, PromptTokens
from fornax.tune.rl.collect import Drawn
from fornax.tune.rollout import (
    ChatFraming,
    ConversationConfig,
    Environment,
    Framing,
    Limits,
    Sampler,
    SampleSettings,
    StreamSampler,
    TextFraming,
    Tool,
    ToolEnvironment,
    ToolPool,
    run_trajectories,
)
from fornax.tune.rollout.tool_worker import find_function

__all__ = ["Conversations", "draw_conversations"]


def draw_conversations(
    make: Callable[[], Environment],
    framing: Framing,
    limits: Limits,
    sampler: StreamSampler,
    prompts: Sequence[PromptTokens],
    settings: SampleSettings,
    seeds: Sequence[int],
) -> list[list[Drawn]]:
    """`settings.n` conversations about each prompt; those of a prompt have the same task.

    Args:
      make: an environment for one conversation. Its record is the prompt's line of data, with the
        prompt under `prompt`.
      framing: how messages become tokens.
      limits: of a conversation, all turns and tokens together.
      sampler: draws the model's turns.
      prompts: one for each group.
      settings: `max_tokens` is of one turn.
      seeds: one for each prompt; conversation i is drawn with seed + i.
    """
    n = settings.n
    records = [{**each.record, "prompt": each.prompt} for each in prompts for _ in range(n)]
    single = replace(settings, n=1)
    found = run_trajectories(
        sampler,
        framing,
        [make() for _ in records],
        records,
        single,
        [seed + i for seed in seeds for i in range(n)],
        limits,
        task_seeds=[seed for seed in seeds for _ in range(n)],
    )
    drawn = [
        Drawn(
            prompt=each.prompt,
            completion=each.completion,
            rewards=each.rewards,
            error=each.error,
        )
        for each in found
    ]
    return [drawn[i : i + n] for i in range(0, len(drawn), n)]


class Conversations:
    """A `Draw` made of a config; holds the tools' processes until `close`.

    Raises `ConfigError` where environment or tools cannot be used, before anything is drawn.
    """

    def __init__(self, config: ConversationConfig, codec: Codec, *, max_tokens: int) -> None:
        """Nothing is begun yet but processes of tools.

        Args:
          config: what the model talks with.
          codec: of the model.
          max_tokens: of a conversation, after its prompt.
        """
        self._limits = Limits(max_turns=config.max_turns, max_tokens=max_tokens)
        self._framing: Framing
        if codec.template is None:
            if config.tools:
                raise ConfigError("the model has no chat template, so it cannot be told of tools")
            self._framing = TextFraming(codec)
        else:
            self._framing = ChatFraming(codec, parser=config.tool_parser)
        self._stack = contextlib.ExitStack()
        self._make = self._factory(config)

    def __call__(
        self,
        sampler: Sampler,
        prompts: Sequence[PromptTokens],
        settings: SampleSettings,
        seeds: Sequence[int],
    ) -> list[list[Drawn]]:
        """See `draw_conversations`."""
        if not hasattr(sampler, "submit"):
            raise ConfigError(
                f"{type(sampler).__name__} takes no single requests, which conversations need; use "
                "LLMSampler"
            )
        stream = cast("StreamSampler", sampler)
        return draw_conversations(
            self._make, self._framing, self._limits, stream, prompts, settings, seeds
        )

    def close(self) -> None:
        """End the tools' processes."""
        self._stack.close()

    def _factory(self, config: ConversationConfig) -> Callable[[], Environment]:
        if config.tools:
            tools = [
                Tool(function=each, timeout_seconds=config.tool_seconds) for each in config.tools
            ]
            pool = self._stack.enter_context(ToolPool(tools, workers=config.tool_workers))
            return lambda: ToolEnvironment(pool)
        try:
            made = find_function(config.environment)
            first: Any = made()
        except Exception as error:
            raise ConfigError(
                f"the environment {config.environment} cannot be made: {error}"
            ) from error
        missing = [name for name in ("tools", "reset", "step") if not hasattr(first, name)]
        if missing:
            raise ConfigError(
                f"the environment {config.environment} has no {', '.join(missing)}; see the guide "
                "on rollouts"
            )
        _close(first)
        return cast("Callable[[], Environment]", made)


def _close(environment: Any) -> None:
    getattr(environment, "close", lambda: None)()
