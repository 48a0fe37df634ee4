"""Numbers as people write them: separators, fractions, mixed numbers, powers of ten, units."""

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Quantity", "agree", "quantity", "several"]

_INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+|\d{1,400}"
_FRACTION = r"""(?: (?P<{0}top>\d{{1,400}}) \s*/\s* (?P<{0}bottom>\d{{1,400}})
    | \\frac \s* (?: \{{ \s*(?P<{0}up>\d{{1,400}})\s* \}} | (?P<{0}u>\d) ) \s*
             (?: \{{ \s*(?P<{0}down>\d{{1,400}})\s* \}} | (?P<{0}d>\d) ) )"""
_POWER = r"""(?: e | \s*(?:\\times|\\cdot|\u00d7|\*)\s* 10\s*\^ )
    \s*\{?\s* (?P<power>[-+]?\d{1,3}) \s*\}?"""
_FORM = re.compile(
    rf"""(?P<sign>[-+]?) \s* (?P<money>[$€£]?) \s* (?:
      (?P<whole>{_INTEGER}) (?:\s+(?:and\s+)?|(?=\\frac)) {_FRACTION.format("mixed_")}
    | {_FRACTION.format("")}
    | (?P<decimal>(?:{_INTEGER})(?P<point>\.\d{{0,400}})?|\.\d{{1,400}}) (?:{_POWER})? )
    (?:\s*(?P<percent>\\?%))? (?P<unit>.*)""",
    re.VERBOSE | re.IGNORECASE,
)
_REWRITES = (
    (r"\u2212", "-"),
    (r"\{,\}", ","),
    (r"\\[,;:! ]|[~\s\u00a0\u2009\u202f]", " "),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left|\\right", ""),
    (r"\\\$", "$"),
    (r"\s*per ?cent\.?$", "%"),
)
_WRAPPED = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\bdegrees?\b)")
_WORDS = re.compile(r"[A-Za-zµΩ°]+(?:\^\d)?(?:[ /·][A-Za-zµΩ]+(?:\^\d)?){0,3}")
_SHORT = frozenset(re.findall(r"\w+", "m g s h L l cm mm km kg mg lb oz ft in yd mi ml mL hr Hz"))
_NO_UNITS = frozenset(("and", "or", "to", "than", "mod", "from", "with", "not", "sqrt", "frac"))
_MONEY = {"$": "dollar", "€": "euro", "£": "pound"}


@dataclass(frozen=True)
class Quantity:
    """A number that is written out, and what it counts."""

    value: Fraction
    place: int | None
    """The power of ten that decimal places count from, for one with a decimal point; None for what
    is exact."""
    unit: str
    """Without plural; empty for a bare number."""


def quantity(text: str) -> Quantity | None:
    r"""The number that a text is, such as 1,234.5, -1\frac{1}{2} or 10 cm; None for anything else.

    A comma or a space parts groups of three digits, or the text is not a number. A percentage is
    its hundredth.
    """
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] == "$":
        bare = bare[1:-1]
    for pattern, by in _REWRITES:
        bare = re.sub(pattern, by, bare)
    found = _FORM.fullmatch(bare.strip().rstrip("."))
    unit = None if found is None else _unit(found["unit"])
    if found is None or unit is None:
        return None
    unit = _MONEY.get(found["money"], unit)
    power = int(found["power"] or 0)
    try:
        if found["decimal"]:
            value = Fraction(re.sub(r"[ ,]", "", found["decimal"])) * Fraction(10) ** power
        else:
            whole = Fraction(re.sub(r"[ ,]", "", found["whole"] or "0"))
            value = whole + _fraction(found, "mixed_" if found["whole"] else "")
    except ZeroDivisionError:
        return None
    value = -value if found["sign"] == "-" else value
    place = power if "." in (found["decimal"] or "") else None
    if found["percent"]:
        value, place = value / 100, None if place is None else place - 2
    return Quantity(value, place, unit)


def agree(wanted: Quantity, found: Quantity, digits: int) -> bool:
    """Whether a number is the reference: exactly, or to `digits` places of a decimal reference.

    Units must be the same where both have one; none is converted.
    """
    if wanted.unit and found.unit and wanted.unit != found.unit:
        return False
    if wanted.value == found.value:
        return True
    if wanted.place is None:
        return False
    allowed = Fraction(10) ** (wanted.place - digits) / 2
    # What is zero to this many places has no place that could agree.
    return abs(wanted.value) > allowed and abs(wanted.value - found.value) <= allowed


def several(text: str) -> bool:
    """Whether a text is a bare list of numbers, parted by commas or spaces."""
    return bool(re.fullmatch(r"[-+\d./ ,;]*\d\s*[ ,;]\s*[-+.]?\d[-+\d./ ,;]*", text.strip()))


def _fraction(found: re.Match[str], which: str) -> Fraction:
    top = found[f"{which}top"] or found[f"{which}up"] or found[f"{which}u"]
    bottom = found[f"{which}bottom"] or found[f"{which}down"] or found[f"{which}d"]
    return Fraction(int(top), int(bottom))


def _unit(text: str) -> str | None:
    """A unit in its plain form; None for what may be part of an expression."""
    if not text.strip():
        return ""
    bare = _DEGREES.sub(" °", _WRAPPED.sub(r" \1 ", text))
    bare = " ".join(re.sub(r"\s*\^\s*\{?(\d)\}?", r"^\1", bare).split())
    if not _WORDS.fullmatch(bare):
        return None
    words = re.findall(r"[^\W\d]+|°", bare)
    sure = bare != " ".join(text.split()) or text.startswith(" ")
    known = all(word == "°" or len(word) > 2 or word in _SHORT for word in words)
    if not sure or not (known or _WRAPPED.search(text)) or _NO_UNITS & set(words):
        return None
    return re.sub(r"(?<=[a-z]{3})s\b", "", bare)
