"""What rollouts are made of: completions, turns, trajectories, and the environment's protocol.

Legend: P tokens of a prompt, T tokens of a completion, L layers with experts, k experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from fornax.config.errors import ConfigError

__all__ = ["Completion", "Environment", "Limits", "Message", "Status", "Trajectory", "Turn"]


Status = Literal["ok", "failed", "truncated"]
"""Whether a rollout ended by itself, could not be finished, or ran out of tokens or turns."""

_STATUS: Mapping[str, Status] = {
    "length": "truncated",
    "turns": "truncated",
    "error": "failed",
    "abort": "failed",
}


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """What follows a prompt."""

    tokens: np.ndarray
    """int32 [T], the end token included."""
    logprobs: np.ndarray
    """float32 [T]: of the distribution that the token was drawn from; 0 where `mask` is 0."""
    versions: np.ndarray
    """int32 [T]: version of the weights that made the token; -1 where `mask` is 0."""
    mask: np.ndarray
    """int8 [T]: 1 for the model's own tokens, 0 for those of tools and environments."""
    finish_reason: str
    """`stop` (end token or stop text), `length` (no room for more), and with environments `done`,
    `turns` (no more of them) or `error` (the environment failed)."""
    text: str
    """Without special tokens; of several turns, the model's own text alone."""
    seed: int
    """That it was drawn with."""
    routed_experts: np.ndarray | None = None
    """[P + T - 1, L, k] integers: the experts that each token of prompt and completion took but the
    last, which was drawn and never read; below 0 where none is known. None: not asked for."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def status(self) -> Status:
        """What `finish_reason` means for training; nothing is learned from what failed."""
        return _STATUS.get(self.finish_reason, "ok")

    @property
    def truncated(self) -> bool:
        """Whether it ended for want of room, in tokens or turns, rather than by itself."""
        return self.status == "truncated"


Message = Mapping[str, Any]
"""A message in OpenAI's form: role, content, tool_calls, …"""

Record = Mapping[str, Any]
"""A line of data."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's form; empty for none."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An environment's answer to a message of the model."""

    messages: Sequence[Message] = ()
    """Messages that the model continues from."""
    done: bool = False
    """Whether the trajectory ends here."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards for this turn by name; those of all turns are added up."""


class Environment(Protocol):
    """One task, for one trajectory. Its methods run in a thread, beside other environments'.

    An environment that holds anything open may have a method `close()`, called at the end.
    """

    @property
    def tools(self) -> ToolSchemas:
        """Functions that the model may call, in OpenAI's form; empty for none."""

    def reset(self, record: Record, seed: int) -> Sequence[Message]:
        """Begin.

        Args:
          record: the line of data that the trajectory is about.
          seed: for whatever it draws: the same one begins the same task.

        Returns:
          The conversation up to the model's first turn.
        """

    def step(self, message: Message) -> Turn:
        """Answer the model.

        Args:
          message: the model's: `content`, and `tool_calls` if it made any.
        """


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a trajectory."""

    max_turns: int = 8
    """Turns of the model, at most."""
    max_tokens: int = 1024
    """Tokens after the prompt, those of the environment included, at most."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A completion, or a conversation of a model and an environment, token by token as the model
    saw it."""

    prompt: np.ndarray
    """int32: tokens before the model's first."""
    completion: Completion
    """All that followed; `mask` is 0 on the environment's tokens. `finish_reason` is `done`,
    `turns` or `length` (limits), or `error` (the environment failed). `text` is the model's last
    turn."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By name, added up over the turns; finite."""
    turns: int = 1
    """Turns of the model."""
    messages: Sequence[Message] = ()
    """The whole conversation; empty for a plain completion of a prompt."""
    error: str = ""
    """How the environment failed, if it did: it raised, or its answer cannot be used."""
