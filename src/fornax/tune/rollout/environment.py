"""What a model may talk with: a small protocol for tasks of several turns and for tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fornax.config.errors import ConfigError
from fornax.tune.rollout.completion import Completion

__all__ = ["Environment", "Limits", "Message", "Trajectory", "Turn"]

Message = Mapping[str, Any]
"""A message in OpenAI's form: role, content, tool_calls, …"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an environment makes of the model's words."""

    messages: Sequence[Message] = ()
    """What it says to them; the model goes on after these."""
    done: bool = False
    """Whether it is over; nothing more is said then."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards for this turn by name; those of all turns are added up."""


class Environment(Protocol):
    """One task, for one trajectory. Its methods run in a thread, beside other environments'.

    An environment that holds anything open may have a method `close()`, called at the end.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Functions that the model may call, in OpenAI's form; empty for none."""
        ...

    def reset(self, record: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin.

        Args:
          record: the line of data that the trajectory is about.
          seed: for whatever it draws: the same one begins the same task.

        Returns:
          The conversation up to where the model begins to speak.
        """
        ...

    def step(self, message: Message) -> Turn:
        """Answer the model.

        Args:
          message: what it said: `content`, and `tool_calls` if it made any.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a trajectory goes."""

    max_turns: int = 8
    """Times that the model speaks, at most."""
    max_tokens: int = 1024
    """Tokens after the prompt, those of the environment included, at most."""

    def __post_init__(self) -> None:
        """Check values."""
        for name in ("max_turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A conversation of a model and an environment, token by token as the model saw it."""

    prompt: np.ndarray
    """int32: tokens before the model's first word."""
    completion: Completion
    """All that followed; `mask` is 0 on the environment's tokens. `finish_reason` is `done`,
    `turns` or `length` (limits), or `error` (the environment failed). `text` is the model's last
    turn."""
    rewards: Mapping[str, float]
    """By name, added up over the turns; finite."""
    turns: int
    """Times that the model spoke."""
    messages: Sequence[Message]
    """The whole conversation."""
    error: str = ""
    """How the environment failed, if it did: it raised, or what it said cannot be used."""
