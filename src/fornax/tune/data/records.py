"""Records of post-training data, as read and checked, before they are tokens."""

from dataclasses import dataclass, field
from typing import Any

from fornax.tune.data.messages import Messages

__all__ = ["Chat", "Completion", "Example", "Labelled", "Pair", "Prompt", "Text", "Tools"]

Tools = list[dict[str, Any]] | None
"""Function definitions in OpenAI's form."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to learn every assistant turn of."""

    where: str
    """`FILE:LINE`."""
    messages: Messages
    tools: Tools = None
    variables: dict[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` of the record: further variables of the template."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt, and the completion to learn; both text or both messages."""

    where: str
    prompt: str | Messages
    completion: str | Messages
    tools: Tools = None
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A plain text, all of which is learned."""

    where: str
    text: str


Example = Chat | Completion | Text
"""What supervised fine-tuning learns from."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two completions of one prompt, the first preferred; all text or all messages."""

    where: str
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: Tools = None
    variables: dict[str, Any] = field(default_factory=dict)
    margin: float | None = None
    """By how much `chosen` is better, for reward models with margins."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A completion that is desirable or not."""

    where: str
    prompt: str | Messages
    completion: str | Messages
    label: bool
    tools: Tools = None
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt that the model is to answer, and the line's other columns for reward functions."""

    where: str
    prompt: str | Messages
    tools: Tools = None
    variables: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    """Every other column of the line, such as `answer`."""
