"""Find stop strings in a text that comes in pieces."""

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Holds back only what may begin a stop string.

    The stop string that is complete first wins; of several that end at one character, the longest.
    So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._include = include
        self._held = ""
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._last = frozenset(prefix[-1] for prefix in self._prefixes)
        self._longest = max(map(len, stops)) - 1

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be sent now, and the stop string that ended it."""
        text = self._held + text
        found = self._first(text)
        if found is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        held = self._suspect(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        best = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best

    def _suspect(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if not text or text[-1] not in self._last:
            return 0
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[len(text) - length :] in self._prefixes:
                return length
        return 0
