"""Sizes as a bundle writes them: `t`, `2*t + 1`, `floordiv(t, 4)`; read, never executed."""

import ast
import functools
from collections.abc import Callable, Mapping

from fornax.config.errors import BundleError

__all__ = ["evaluate", "names", "parse"]

_LONGEST = 500
_DEEPEST = 50
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}
_Evaluator = Callable[[Mapping[str, int]], int]


def evaluate(size: int | str, dims: Mapping[str, int]) -> int:
    """The size in numbers, for the given sizes of symbolic dimensions.

    Raises:
      BundleError: for a text that is not a size, or a dimension that `dims` lacks.
    """
    if not isinstance(size, str):
        return size
    direct = dims.get(size)
    if direct is not None:
        return direct
    try:
        return parse(size)(dims)
    except KeyError as error:
        raise BundleError(
            f"size {size!r} names {error}, which is not a dimension of this"
        ) from None
    except ZeroDivisionError:
        raise BundleError(f"size {size!r} divides by zero for {dict(dims)}") from None


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> _Evaluator:
    """A function from sizes of dimensions to the size that `text` says."""
    return _build(_tree(text), text, 0)


@functools.lru_cache(maxsize=4096)
def names(text: str) -> frozenset[str]:
    """The dimensions that a size names."""
    parse(text)
    called = {id(node.func) for node in ast.walk(_tree(text)) if isinstance(node, ast.Call)}
    return frozenset(
        node.id
        for node in ast.walk(_tree(text))
        if isinstance(node, ast.Name) and id(node) not in called
    )


@functools.lru_cache(maxsize=4096)
def _tree(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise BundleError(f"a size is {len(text)} characters long; {_LONGEST} is the most")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BundleError(
            f"{text!r} is not a size; write one as t, 2*t or floordiv(t, 4)"
        ) from None


def _build(node: ast.expr, text: str, depth: int) -> _Evaluator:
    if depth > _DEEPEST:
        raise BundleError(f"size {text[:60]!r}… is nested deeper than {_DEEPEST}")
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return lambda dims: value
        case ast.Name(id=name):
            return lambda dims: dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            of = _build(inner, text, depth + 1)
            return lambda dims: -of(dims)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = _build(left, text, depth + 1), _build(right, text, depth + 1)
            if isinstance(op, ast.Add):
                return lambda dims: a(dims) + b(dims)
            if isinstance(op, ast.Sub):
                return lambda dims: a(dims) - b(dims)
            return lambda dims: a(dims) * b(dims)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            if not 0 <= power <= 8:
                raise BundleError(f"size {text!r} has a power over 8")
            base = _build(left, text, depth + 1)
            return lambda dims: base(dims) ** power
        case ast.Call(func=ast.Name(id=called), args=[left, right], keywords=[]) if (
            called in _FUNCTIONS
        ):
            function = _FUNCTIONS[called]
            a, b = _build(left, text, depth + 1), _build(right, text, depth + 1)
            return lambda dims: function(a(dims), b(dims))
        case _:
            raise BundleError(f"{text!r} is not a size; write one as t, 2*t or floordiv(t, 4)")
