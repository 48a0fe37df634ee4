"""Take a model's reasoning apart from its answer while the text comes."""

from dataclasses import dataclass
from typing import NamedTuple

from fornax.config.errors import EngineError
from fornax.llm.text.parsing import split

__all__ = ["REASONING_PARSERS", "Reasoned", "ReasoningParser", "ReasoningStyle", "reasoning_style"]


class Reasoned(NamedTuple):
    """What a text added: to the reasoning, and to the answer."""

    reasoning: str
    content: str


@dataclass(frozen=True)
class ReasoningStyle:
    """How a family marks its reasoning."""

    begin: str
    end: str
    starts_open: bool
    """Whether a text without `begin` starts as reasoning: the template has opened it."""

    def opened_by(self, prompt: str) -> bool:
        """Whether a text after this prompt starts as reasoning."""
        end = prompt.rstrip()
        return end.endswith(self.begin) or (self.starts_open and not end.endswith(self.end))

    def parser(self, *, opened: bool | None = None) -> "ReasoningParser":
        """A parser of one text; `opened` (see `opened_by`) None means the family's habit."""
        return ReasoningParser(self, self.starts_open if opened is None else opened)


class ReasoningParser:
    """One text's reasoning and answer, the markers left out.

    White space after either marker and before the end marker is left out too.
    """

    def __init__(self, style: ReasoningStyle, opened: bool):
        self._style = style
        self._opened = opened
        self._begun = False
        self._ended = False
        self._trim = True
        self._held = ""

    @property
    def ended(self) -> bool:
        """Whether the answer has begun."""
        return self._ended

    def push(self, text: str) -> Reasoned:
        """Read on; what may begin a marker is held back."""
        text = self._held + text
        self._held = ""
        if not self._begun and not self._ended:
            text = self._begin(text)
        reasoning = ""
        if self._begun and not self._ended:
            reasoning, text = self._reason(text)
        return Reasoned(reasoning, self._answer(text) if self._ended else "")

    def finish(self) -> Reasoned:
        """What was held back."""
        held, self._held = self._held, ""
        if self._ended:
            return Reasoned("", held)
        if self._begun or (self._opened and held.strip()):
            return Reasoned(held.rstrip(), "")
        return Reasoned("", held)

    def _begin(self, text: str) -> str:
        """Read the begin marker, if the text has one at its start."""
        start = text.lstrip()
        if start.startswith(self._style.begin):
            self._begun = True
            return start[len(self._style.begin) :]
        if self._style.begin.startswith(start):
            self._held = text
            return ""
        self._begun, self._ended = self._opened, not self._opened
        self._trim = self._opened
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        found = split(text, [self._style.end])
        if found.marker is not None:
            self._ended = self._trim = True
            return found.before.rstrip(), found.after
        shown = found.before.rstrip()
        self._held = text[len(shown) :]
        return shown, ""

    def _answer(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


_THINK = ("<think>", "</think>")

REASONING_PARSERS = {
    "deepseek_r1": ReasoningStyle(*_THINK, starts_open=True),
    "qwen3": ReasoningStyle(*_THINK, starts_open=False),
    "olmo3": ReasoningStyle(*_THINK, starts_open=True),
    "smollm3": ReasoningStyle(*_THINK, starts_open=False),
    "phi4": ReasoningStyle(*_THINK, starts_open=False),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]", starts_open=False),
}
"""By the names of vLLM where both have them."""


def reasoning_style(name: str) -> ReasoningStyle:
    """A style by name. Raises `EngineError` for an unknown one."""
    if name not in REASONING_PARSERS:
        raise EngineError(
            f"reasoning_parser={name!r} is unknown; use {', '.join(sorted(REASONING_PARSERS))}"
        )
    return REASONING_PARSERS[name]
