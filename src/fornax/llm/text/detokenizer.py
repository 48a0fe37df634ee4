"""Text from tokens as they come: whole characters only, cut at stop strings."""

import codecs
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from fornax.llm.text.token_table import TokenTable

__all__ = ["Detokenizer", "Pushed", "StopStrings"]


class StopStrings:
    """Holds back only what may begin a stop string; each character takes constant time.

    The stop string that is complete first wins; of several that end at one character, the longest.
    So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._automaton = _automaton(tuple(stops))
        self._include = include
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be sent now, and the stop string that ended it."""
        automaton, state = self._automaton, self._state
        if not state and automaton.first.isdisjoint(text):
            return text, None
        first = len(self._held)
        text = self._held + text
        for place in range(first, len(text)):
            state = automaton.step(state, text[place])
            length = automaton.ends[state]
            if length:
                self._held, self._state = "", 0
                begin, end = place + 1 - length, place + 1
                return text[: end if self._include else begin], text[begin:end]
        sent = len(text) - automaton.depth[state]
        self._held, self._state = text[sent:], state
        return text[:sent], None

    def finish(self) -> str:
        """What was held back."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """Which beginning of a stop string a text ends with (Aho and Corasick 1975).

    A state is such a beginning, 0 the empty one.
    """

    def __init__(self, stops: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """The longest other beginning that each one ends with."""
        self.depth = [0]
        """Length of each."""
        self.ends = [0]
        """Length of the longest stop string that each ends with; 0 for none."""
        for stop in stops:
            self._add(stop)
        self._link()
        self.first = frozenset(self._next[0])

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while char not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][char]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.ends.append(0)
            state = self._next[state][char]
        self.ends[state] = len(stop)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, longer in self._next[state].items():
                self._shorter[longer] = self.step(self._shorter[state], char)
                self.ends[longer] = self.ends[longer] or self.ends[self._shorter[longer]]
                waiting.append(longer)


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """One for all completions of a request."""
    return _Automaton(stops)


_Utf8 = codecs.getincrementaldecoder("utf-8")


class Pushed(NamedTuple):
    """What tokens added to a text."""

    text: str
    """Text that may be sent: nothing that a later token could take back."""
    stop: str | None
    """The stop string that was completed; the text ends there."""
    consumed: int
    """Tokens read, the one that completed the stop string included; the rest are to be dropped."""


class _TableReader:
    """Characters from the token table."""

    def __init__(self, table: TokenTable, skip: bool, raw_added: bool, prompt: Sequence[int]):
        self._pieces = table.pieces(skip)
        self._added = table.added if raw_added else {}
        self._last_added = bool(prompt) and prompt[-1] in self._added
        self._utf8 = _Utf8("replace")
        self._partial = False
        begun = not table.strips or table.has_text(list(prompt), skip)
        self._strips = 0 if begun else table.strips

    def read(self, token: int) -> str:
        piece = self._pieces[token]
        if self._added:
            added = self._added.get(token)
            if added is not None and self._last_added:
                piece = added
            self._last_added = added is not None
        if self._partial or type(piece) is bytes:
            piece = self._utf8.decode(piece.encode() if isinstance(piece, str) else piece)
            self._partial = bool(self._utf8.getstate()[0])
        if self._strips and piece:
            piece = self._strip(str(piece))
        return piece  # pyrefly: ignore[bad-return]

    def _strip(self, text: str) -> str:
        """Take spaces from the start of a text, no more than the decoder does."""
        left = len(text) - len(text.lstrip(" "))
        removed = min(left, self._strips)
        self._strips = self._strips - removed if removed == len(text) else 0
        return text[removed:]


class _StreamReader:
    """Characters from the library's own stream, for decoders that no table describes."""

    def __init__(self, table: TokenTable, skip: bool, raw_added: bool, prompt: Sequence[int]):
        self._backend = table.backend
        self._skip = skip
        self._added = table.added if raw_added else {}
        self._last_added = bool(prompt) and prompt[-1] in self._added
        self._stream = DecodeStream(list(prompt), skip_special_tokens=skip)

    def read(self, token: int) -> str:
        text = self._step(token)
        if self._added:
            added = self._added.get(token)
            if added is not None and self._last_added:
                text = added
            self._last_added = added is not None
        return text

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception as error:  # the library raises bare Exception
            if "prefix" not in str(error):
                raise
            # Bytes that are not a character changed the text before them: start again after them.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._backend, token) or ""


class Detokenizer:
    """The text of one sequence.

    `prompt` are the prompt's tokens: a SentencePiece-style tokenizer drops the space at the
    start of a text, which is the output's start only when the prompt says nothing.
    `spaces_between_special_tokens=False` writes an added token that follows another one as it is
    spelled. Stop strings count from the token after the first `min_tokens`.

    A character whose last bytes never come is left out, as in vLLM. Bytes that can be no character
    become U+FFFD.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        raw_added = not (skip_special_tokens or spaces_between_special_tokens)
        reader = _TableReader if table.exact else _StreamReader
        self._read = reader(table, skip_special_tokens, raw_added, prompt[-16:]).read
        self._stops = StopStrings(stop, include_stop_str_in_output) if stop else None
        self._unchecked = min_tokens
        self.stop: str | None = None

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Add tokens; nothing is read after a stop string."""
        if self._stops is None:
            read = self._read
            text = read(tokens[0]) if len(tokens) == 1 else "".join([read(t) for t in tokens])
            return Pushed(text, None, len(tokens))
        return self._push_until_stop(self._stops, tokens)

    def _push_until_stop(self, stops: StopStrings, tokens: Sequence[int]) -> Pushed:
        parts = []
        consumed = 0
        for token in tokens:
            if self.stop is not None:
                break
            consumed += 1
            text = self._read(token)
            if self._unchecked > 0:
                self._unchecked -= 1
                parts.append(text)
            elif text:
                text, self.stop = stops.push(text)
                parts.append(text)
        return Pushed("".join(parts), self.stop, consumed)

    def finish(self) -> str:
        """What was held back because it might have begun a stop string."""
        return self._stops.finish() if self._stops is not None else ""
