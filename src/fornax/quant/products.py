"""Which parameters a module multiplies by, and along which of their axes, read off its jaxpr."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

__all__ = ["Uses", "find_uses"]

_PASSED = (
    "convert_element_type",
    "copy",
    "copy_p",
    "sharding_constraint",
    "stop_gradient",
    "pvary",
)
"""Operations that give a parameter on as it is."""


@dataclass
class Uses:
    """What is done with one parameter."""

    products: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    """Names of products, and the axes that they sum over, counted from the last."""
    others: set[str] = field(default_factory=set)
    """Other operations that read it."""


@dataclass(frozen=True)
class _Seen:
    """A value that is a parameter, or a layer of it, its axes in another order."""

    path: str
    axes: tuple[int, ...]
    """Of the parameter, counted from the last, one for each axis of the value."""


def find_uses(module: nnx.Module, inputs: Sequence[Any]) -> dict[str, Uses]:
    """What calling a module does with each of its parameters, by path.

    Args:
      module: called with `inputs`, abstractly.
      inputs: arrays, or what has a shape and a dtype.
    """
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten_with_path(state)
    paths = [_path(path) for path, _ in leaves]

    def call(values: list[Any], inputs: Sequence[Any]) -> Any:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, values))(*inputs)

    closed = jax.make_jaxpr(call)([leaf for _, leaf in leaves], inputs)
    seen = {
        var: _Seen(path, tuple(range(-len(var.aval.shape), 0)))
        for var, path in zip(closed.jaxpr.invars, paths, strict=False)
    }
    found: dict[str, Uses] = {}
    _walk(closed.jaxpr, seen, found)
    return found


def _path(path: Sequence[Any]) -> str:
    """a/b/kernel of a leaf of the state, without what a variable's own value is called."""
    names = [key.key for key in path if not isinstance(key, jax.tree_util.GetAttrKey)]
    return "/".join(map(str, names))


def _walk(jaxpr: Jaxpr, seen: dict[Var, _Seen], found: dict[str, Uses]) -> None:
    for equation in jaxpr.eqns:
        operands = [
            (number, seen[var])
            for number, var in enumerate(equation.invars)
            if not isinstance(var, Literal) and var in seen
        ]
        if not operands:
            continue
        name = equation.primitive.name
        if name in _PASSED:
            seen[equation.outvars[0]] = operands[0][1]
        elif name == "transpose":
            axes = operands[0][1].axes
            order = tuple(axes[axis] for axis in equation.params["permutation"])
            seen[equation.outvars[0]] = _Seen(operands[0][1].path, order)
        elif inner := list(_inner(equation)):
            for body, mapping in inner:
                below = {}
                for number, value in operands:
                    for at, dropped in mapping.get(number, ()):
                        below[body.invars[at]] = _Seen(value.path, value.axes[dropped:])
                _walk(body, below, found)
        else:
            for number, value in operands:
                uses = found.setdefault(value.path, Uses())
                summed = _summed(equation, number)
                if summed is None:
                    uses.others.add(name)
                else:
                    uses.products.add((name, tuple(sorted(value.axes[axis] for axis in summed))))


def _summed(equation: JaxprEqn, operand: int) -> tuple[int, ...] | None:
    """Axes of an operand that a product sums over; None for another operation."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return tuple(params["dimension_numbers"][0][operand])
    if name == "conv_general_dilated" and operand == 1:
        spec = params["dimension_numbers"].rhs_spec  # outputs, inputs, places
        return tuple(spec[1:])
    return None


def _axes(operand: Any) -> int:
    return len(operand.aval.shape)


def _inner(equation: JaxprEqn) -> Iterator[tuple[Jaxpr, Mapping[int, list[tuple[int, int]]]]]:
    """Jaxprs within an operation: for each operand, which inputs get it, less how many axes."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        body = params["jaxpr"].jaxpr
        pairs = enumerate(zip(equation.invars, body.invars, strict=True))
        yield body, {at: [(at, _axes(given) - _axes(read))] for at, (given, read) in pairs}
        return
    if name == "cond":
        for branch in params["branches"]:
            yield branch.jaxpr, {at + 1: [(at, 0)] for at in range(len(branch.jaxpr.invars))}
        return
    if name == "while":
        body = params["body_jaxpr"].jaxpr
        start, consts = params["cond_nconsts"], params["body_nconsts"]
        yield body, {start + at: [(at, 0)] for at in range(consts)}
        return
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        given = params.get(key)
        body = given.jaxpr if isinstance(given, ClosedJaxpr) else given
        if isinstance(body, Jaxpr) and len(body.invars) == len(equation.invars):
            yield body, {at: [(at, 0)] for at in range(len(body.invars))}
            return
