"""The program's side of the tests: does what the judge asks with the program's own objects.

Runs inside the sandbox beside untrusted code, which may replace all of it: what is sent from here
is believed to be no more than a value. Standard library only.
"""

from __future__ import annotations

import builtins
import operator

import values  # pyrefly: ignore[missing-import]

TYPE_CHECKING = False  # importing typing takes longer than judging
if TYPE_CHECKING:
    from typing import Any

__all__ = ["answer"]

_OPERATIONS = {
    "call": lambda function, *given, **named: function(*given, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "isinstance": isinstance,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
}
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
)
_BASES: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    **{kind: kind for kind in (complex, bytes, list, tuple, dict, set, frozenset)},
}


def answer(space: dict[str, object], requests: int, answers: int) -> None:
    """Answer the judge until it is gone.

    Args:
      space: the program's global names.
      requests: descriptor of frames (number, operation, operands, keywords, whether the operands
        are wanted back).
      answers: descriptor for frames (number, "value", result, operands but the first), (number,
        "raised", names of the exception's classes, its text) or (number, "unfit", [], why).
    """
    objects: list[Any] = []

    def refer(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    while True:
        try:
            frame = values.receive(requests)
        except EOFError:
            return
        number, operation, operands, named, back = values.decode(frame, objects.__getitem__)
        try:
            if operation == "names":
                result: Any = _names(space, operands)
            else:
                result = _OPERATIONS[operation](*operands, **named)
            said = (number, "value", _plain(result), operands[1:] if back else ())
            data = values.encode(said, refer)
        except values.MalformedError as error:
            data = values.encode((number, "unfit", [], str(error)), refer)
        except BaseException as error:
            classes = [kind.__name__ for kind in type(error).__mro__]
            data = values.encode((number, "raised", classes, str(error)[:1000]), refer)
        values.send(answers, data)


def _names(space: dict[str, object], wanted: tuple[str, ...]) -> tuple[dict, dict]:
    """What the program calls by some names; of its exceptions the name of a built-in base."""
    found = {name: _plain(space[name]) for name in wanted if name in space}
    raised = {
        name: next(kind.__name__ for kind in value.__mro__ if hasattr(builtins, kind.__name__))
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    return {name: value for name, value in found.items() if name not in raised}, raised


def _plain(value: object, depth: int = 0) -> Any:
    """A value with subclasses of plain types (Counter, IntEnum, named tuples) made plain."""
    kind = type(value)
    if depth > 128:
        return value
    if kind not in _PLAIN:
        for base, convert in _BASES.items():
            if isinstance(value, base):
                value = convert(value)
                break
        else:
            return value
    if isinstance(value, dict):
        return {_plain(k, depth + 1): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_plain(item, depth + 1) for item in value)
    return value
