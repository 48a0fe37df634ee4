"""What a user may say about conversations with environments and tools."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.tune.rollout.environment import Limits

__all__ = ["ConversationConfig"]


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """What the model talks with."""

    environment: str = ""
    """FILE.py:NAME or MODULE:NAME of a class, made anew for each completion; empty: tools alone."""
    tools: tuple[str, ...] = ()
    """FILE.py:NAME or MODULE:NAME of functions that the model may call, each run in a process."""
    tool_parser: str | None = None
    """How the model writes calls: hermes, llama3_json, mistral, pythonic, …; needed with tools."""
    tool_seconds: float = 5.0
    """The longest a call may take."""
    tool_workers: int = 2
    """Processes that run tools."""
    max_turns: int = 8
    """Times that the model speaks, at most."""
    max_failed: float = 0.25
    """Share of a round's conversations that may fail (the environment raises, say) and are left out
    of the loss; more end the run, with the reason."""

    def __post_init__(self) -> None:
        """Check that there is something to talk with."""
        if bool(self.environment) == bool(self.tools):
            raise ConfigError(
                "a conversation takes an environment or tools, one of the two; an environment may "
                "run tools of its own with ToolPool"
            )
        if self.tools and self.tool_parser is None:
            raise ConfigError(
                "tools need tool_parser, the way the model writes its calls, such as hermes"
            )
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"max_failed={self.max_failed} is a share of conversations and must lie in [0, 1]"
            )
        Limits(max_turns=self.max_turns)
