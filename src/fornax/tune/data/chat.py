"""Conversations to tokens, with a mask over what the assistant wrote.

Which tokens those are is known in two ways. A template may mark them (`{% generation %}`): the mask
is then transformers' `return_assistant_tokens_mask`. Otherwise it is what stands between the prompt
of a turn, rendered with the generation prompt, and the end of the turn's rendering: exactly what
the model writes when it is served. The first kind may include more, such as a line break after the
turn's end; both include the end itself.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fornax.config.errors import DataError, EngineError
from fornax.llm.text import ChatTemplate
from fornax.tune.data.encoded import Encoded, encoded
from fornax.tune.data.records import Chat, Messages, Tools, Variables
from fornax.tune.data.tokenizer import TextEncoder

__all__ = ["ChatEncoder"]


_SHOWN = 40


class Render(Protocol):
    """Renders the first messages of a conversation."""

    def __call__(self, count: int, *, ask: bool) -> str:
        """The first `count` messages; with `ask`, and the generation prompt."""


@dataclass
class Rendering:
    """A rendering, and the spans of characters of its turns that are learned."""

    text: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)


def renderings(render: Render, turns: Sequence[tuple[int, bool]]) -> Iterator[Rendering]:
    """Renderings in which every learned turn stands as the model wrote it.

    A template whose renderings of longer and longer beginnings all continue each other gives one.
    Where it writes an earlier turn otherwise once later messages follow, that turn is learned from
    the rendering that ends with it.

    Args:
      render: renders beginnings of the conversation.
      turns: the place of each assistant message, and whether it is learned.

    Raises:
      DataError: when an answer does not continue its prompt.
    """
    current = Rendering()
    for place, wanted in turns:
        whole = render(place + 1, ask=False)
        if not whole.startswith(current.text):
            yield current
            current = Rendering()
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


_CONTEXT = 24
"""Characters of a rendering that an error shows."""


class ChatEncoder:
    """Encodes conversations with one template."""

    def __init__(
        self,
        encoder: TextEncoder,
        template: ChatTemplate | None,
        *,
        eos_ids: Sequence[int],
        variables: Variables,
    ):
        self._encoder = encoder
        self._template = template
        self._eos_ids = tuple(eos_ids)
        self._variables = variables

    def prompt(self, messages: Messages, tools: Tools, variables: Variables | None) -> np.ndarray:
        """Ids of a prompt that ends where the assistant begins, int32 `[n]`."""
        self._check_text(messages, tools)
        text = self._render(messages, tools, variables, True)
        return self._checked_start(np.asarray(self._encoder.encode_with_offsets(text)[0], np.int32))

    def chat(self, chat: Chat) -> list[Encoded]:
        """Every assistant turn of weight 1 learned."""
        messages = _without_weights(chat.messages)
        self._check_text(messages, chat.tools)
        wanted = [m.get("weight", 1) == 1 for m in chat.messages if m["role"] == "assistant"]
        if not any(wanted):
            raise DataError("every assistant message has weight 0: there is nothing to learn")
        text, spans = self._marked(messages, chat.tools, chat.variables)
        if spans:
            return [self._masked(text, _chosen(spans, wanted))]
        found = self._renderings(messages, chat.tools, chat.variables, wanted)
        return [self._masked(t.text, t.spans, upto_end=True) for t in found if t.spans]

    def completion(
        self,
        prompt: Messages,
        completion: Messages,
        tools: Tools,
        variables: Variables | None,
    ) -> Encoded:
        """The assistant turns of `completion` learned."""
        whole = _without_weights([*prompt, *completion])
        self._check_text(whole, tools)
        before = sum(m["role"] == "assistant" for m in prompt)
        after = sum(m["role"] == "assistant" for m in completion)
        wanted = [False] * before + [True] * after
        try:
            found = [t for t in self._renderings(whole, tools, variables, wanted) if t.spans]
        except DataError:
            text, spans = self._marked(whole, tools, variables)
            if not spans:
                raise
            return self._masked(text, _chosen(spans, wanted))
        if len(found) > 1:
            raise DataError(
                "the chat template writes the completion's first answers differently once others "
                "follow, so that they are not a single text; give a completion of one answer"
            )
        return self._masked(found[0].text, found[0].spans, upto_end=True)

    def _render(
        self, messages: Messages, tools: Tools, variables: Variables | None, ask: bool
    ) -> str:
        given = {**self._variables, **(variables or {})}
        with _refusals_of_data():
            return self._needed().render(
                messages, tools=tools, add_generation_prompt=ask, variables=given
            )

    def _marked(
        self, messages: Messages, tools: Tools, variables: Variables | None
    ) -> tuple[str, list[tuple[int, int]]]:
        given = {**self._variables, **(variables or {})}
        with _refusals_of_data():
            return self._needed().render_marked(messages, tools=tools, variables=given)

    def _needed(self) -> ChatTemplate:
        if self._template is None:
            raise DataError(
                "is a conversation, and the model has no chat template; name a Jinja file with "
                "--template, or give text"
            )
        return self._template

    def _renderings(
        self,
        messages: Messages,
        tools: Tools,
        variables: Variables | None,
        wanted: Sequence[bool],
    ) -> Iterator[Rendering]:
        def render(count: int, *, ask: bool) -> str:
            return self._render(messages[:count], tools, variables, ask)

        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        return renderings(render, list(zip(places, wanted, strict=True)))

    def _check_text(self, messages: Messages, tools: Tools) -> None:
        """Refuse messages that spell what only the template may write."""
        for number, message in enumerate(messages, 1):
            text = json.dumps(message, ensure_ascii=False)
            found = self._encoder.find_special(text)
            if found:
                raise DataError(
                    f"message {number} ({message['role']}) spells the special token {found}, which "
                    "only the chat template may write; remove it from the text"
                )
        found = self._encoder.find_special(json.dumps(tools, ensure_ascii=False)) if tools else None
        if found:
            raise DataError(f"tools spell the special token {found}; remove it from the text")

    def _masked(
        self, text: str, spans: Sequence[tuple[int, int]], *, upto_end: bool = False
    ) -> Encoded:
        """The text's tokens; those of the spans are learned, each with the end of its turn.

        With `upto_end` a span ends with the turn's end token: what a template writes after it, such
        as a line break, the model never does.
        """
        ids, offsets = self._split(text, [start for start, _ in spans])
        mask = np.zeros(len(ids), bool)
        ends = np.isin(ids, self._eos_ids)
        for start, stop in spans:
            inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
            mask[inside] = True
            after = int(inside[-1]) + 1 if len(inside) else len(ids)
            end = self._turn_end(ids, inside[ends[inside]])
            if upto_end and end is not None:
                mask[end + 1 : after] = False
            if end is None:
                if after >= len(ids) or not ends[after]:
                    raise self._no_end(text, start, stop)
                mask[after] = True
        return encoded(self._checked_start(ids), mask)

    def _turn_end(self, ids: np.ndarray, ends: np.ndarray) -> int | None:
        """The first of a turn's last end tokens: what follows it is ends and space alone."""
        if not len(ends):
            return None
        found = last = int(ends[-1])
        for place in ends[::-1].tolist():
            if self._encoder.decode(np.setdiff1d(ids[place:last], ids[ends])).strip():
                break
            found = place
        return found

    def _split(self, text: str, starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 `[n]` and their places in characters `[n, 2]`, no token across a start.

        A token that begins in the prompt and ends in the answer could never be written by a model
        that is served with the prompt's own tokens.
        """
        cuts: list[int] = []
        while True:
            ids: list[int] = []
            places = [np.zeros((0, 2), np.int64)]
            for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
                found, offsets = self._encoder.encode_with_offsets(
                    text[begin:end], follows=begin > 0
                )
                ids += found
                places.append(offsets + begin)
            offsets = np.concatenate(places)
            across = [
                start
                for start in starts
                if ((offsets[:, 0] < start) & (offsets[:, 1] > start)).any()
            ]
            if not across or set(across) <= set(cuts):
                return np.asarray(ids, np.int32), offsets
            cuts = sorted({*cuts, *across})

    def _checked_start(self, ids: np.ndarray) -> np.ndarray:
        bos = self._encoder.bos_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise DataError(
                f"the chat template begins with {self._encoder.decode([bos])} twice; fix the "
                "template"
            )
        return ids

    def _no_end(self, text: str, start: int, stop: int) -> DataError:
        names = ", ".join(self._encoder.decode([i]) for i in self._eos_ids) or "none"
        turn = text[max(start, stop - _CONTEXT) : stop]
        return DataError(
            f"the chat template ends an assistant turn with {turn!r} and no end token ({names}), "
            "so the model would not learn to stop; add the turn's end to eos_token_id in "
            "generation_config.json, or give a template that writes eos_token"
        )


@contextlib.contextmanager
def _refusals_of_data() -> Iterator[None]:
    """Raise DataError for what a template refuses."""
    try:
        yield
    except EngineError as error:
        raise DataError(str(error)) from error


def _without_weights(messages: Messages) -> Messages:
    """Messages as a template may see them."""
    return [{k: v for k, v in message.items() if k != "weight"} for message in messages]


def _chosen(spans: list[tuple[int, int]], wanted: Sequence[bool]) -> list[tuple[int, int]]:
    """The spans of the assistant turns that are wanted; all, when all are."""
    if all(wanted):
        return spans
    if len(spans) != len(wanted):
        raise DataError(
            f"the chat template marks {len(spans)} spans as generated where the conversation has "
            f"{len(wanted)} assistant messages, so some cannot be left out; fix the template's "
            "generation marks"
        )
    return [span for span, keep in zip(spans, wanted, strict=True) if keep]
