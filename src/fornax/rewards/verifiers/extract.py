"""Finding the answer in a completion: fenced blocks, boxes, numbers."""

import re

__all__ = ["answer_text", "boxed", "fenced_block", "last_number"]

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?:[eE][-+]?\d+)?%?"
)


def fenced_block(text: str) -> str | None:
    """The inside of the last closed ``` block, or None."""
    found = _FENCE.findall(text)
    return found[-1] if found else None


def boxed(text: str) -> str | None:
    r"""The inside of the last `\boxed{…}` or `\fbox{…}` with its braces balanced, or None."""
    for start in sorted(
        (m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)), reverse=True
    ):
        depth = 1
        for place in range(start, len(text)):
            if text[place - 1] == "\\":
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number in a text, as written, or None."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def answer_text(text: str) -> str | None:
    r"""The answer of a solution: the last `\boxed{}`, what follows the last ####, the last number.

    Returns:
      The first of these that is there, or None.
    """
    inside = boxed(text)
    if inside is not None:
        return inside
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n", 1)[0].strip()
    return last_number(text)
