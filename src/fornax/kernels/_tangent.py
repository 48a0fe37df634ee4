"""Derivatives of functions of two arrays whose gradients are one native call.

Forwards, under `vmap` and when differentiated again they are those of the formula.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["native_tangent"]


def native_tangent(
    name: str,
    formula: Callable[[Any, jax.Array, jax.Array], jax.Array],
    gradients: Callable[..., tuple[jax.Array, jax.Array]],
) -> Callable[..., jax.Array]:
    """Return `tangent(da, db, a, b, how=how)`, that of `formula(how, a, b)`, for a custom JVP.

    It is linear in da and db, and its transpose calls `gradients`, so bind it only where those run.

    Args:
        name: of the primitive.
        formula: of something static and two arrays, in the shape and dtype of the first.
        gradients: `gradients(how, dy, a, b)`, those of a and b.
    """

    def plain(how: Any, dy: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(functools.partial(formula, how), a, b)[1](dy)

    native = jax.custom_jvp(gradients, nondiff_argnums=(0,))
    native.defjvp(
        lambda how, primals, tangents: jax.jvp(functools.partial(plain, how), primals, tangents)
    )

    def tangent(da: Any, db: Any, a: jax.Array, b: jax.Array, *, how: Any) -> jax.Array:
        return jax.jvp(functools.partial(formula, how), (a, b), (da, db))[1]

    def transpose(dy: Any, da: Any, db: Any, a: jax.Array, b: jax.Array, *, how: Any) -> list[Any]:
        if isinstance(dy, ad.Zero):
            return [ad.Zero(da.aval), ad.Zero(db.aval), None, None]
        wanted = (ad.is_undefined_primal(da), ad.is_undefined_primal(db))
        found = zip(native(how, dy, a, b), wanted, strict=True)
        return [*(gradient if want else None for gradient, want in found), None, None]

    def batch(arrays: Any, dims: Any, *, how: Any) -> tuple[jax.Array, int]:
        run = functools.partial(tangent, how=how)
        return jax.vmap(run, in_axes=tuple(dims))(*arrays), 0

    primitive = Primitive(name)
    primitive.def_impl(tangent)
    primitive.def_abstract_eval(lambda da, db, a, b, *, how: da)
    mlir.register_lowering(primitive, mlir.lower_fun(tangent, multiple_results=False))
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    return primitive.bind
