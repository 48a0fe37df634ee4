"""Find stop strings in a text that comes in pieces."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["StopStrings"]


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
