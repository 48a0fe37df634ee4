"""Where each assistant turn stands in a template's rendering, found without marks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fornax.config.errors import DataError

__all__ = ["Render", "Turns", "chains"]

_SHOWN = 40


class Render(Protocol):
    """Renders the first messages of a conversation."""

    def __call__(self, count: int, *, ask: bool) -> str:
        """The first `count` messages; with `ask`, and the generation prompt."""
        ...


@dataclass
class Turns:
    """A rendering, and the spans of characters of its turns that are learned."""

    text: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)


def chains(render: Render, turns: Sequence[tuple[int, bool]]) -> Iterator[Turns]:
    """Renderings in which every learned turn stands as the model wrote it.

    A template whose renderings of longer and longer beginnings all go on from each other gives one.
    Where it writes an earlier turn otherwise once later messages follow, that turn is learned from
    the rendering that ends with it.

    Args:
      render: renders beginnings of the conversation.
      turns: the place of each assistant message, and whether it is learned.

    Raises:
      DataError: when an answer does not go on from its prompt.
    """
    current = Turns()
    for place, wanted in turns:
        whole = render(place + 1, ask=False)
        if not whole.startswith(current.text):
            yield current
            current = Turns()
        if wanted:
            head = render(place, ask=True)
            if not whole.startswith(head):
                raise _differs(head, whole, place)
            current.spans.append((len(head), len(whole)))
        current.text = whole
    yield current


def _differs(head: str, whole: str, place: int) -> DataError:
    same = next(
        (i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b),
        min(len(head), len(whole)),
    )
    return DataError(
        f"the chat template asks for message {place + 1} with "
        f"{head[same : same + _SHOWN]!r} after {head[max(0, same - _SHOWN) : same]!r}, but writes "
        f"the answer with {whole[same : same + _SHOWN]!r} there: the model would learn from a "
        "prompt that it never sees; give a template with {% generation %} marks with --template, "
        "or template variables that make both alike"
    )
