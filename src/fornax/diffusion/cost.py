"""Floating-point operations of a function, counted in its trace: products and convolutions."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from fornax import kernels

__all__ = ["traced_flops"]


def traced_flops(run: Callable[..., Any], *arguments: Any) -> float:
    """Of all products of matrices and convolutions, two for each product of numbers.

    A loop counts as often as it runs, of branches the dearest; elementwise work does not count.
    Nothing is compiled or computed.

    Args:
      run: computes in float32, so that no kernel hides the products of attention.
      arguments: arrays or ShapeDtypeStructs.
    """
    with kernels.target_platform("gpu"):
        return _count(jax.make_jaxpr(run)(*arguments).jaxpr)


def _count(jaxpr: core.Jaxpr) -> float:
    return sum(map(_flops, jaxpr.eqns))


def _flops(eqn: core.JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = _shape(eqn.invars[0])
        terms = math.prod(left[axis] for axis in contracted)
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * terms
    if name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) / outputs
    inner = [_count(jaxpr) for jaxpr in _inside(params)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _inside(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """The programs that an equation runs."""
    for value in params.values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one
