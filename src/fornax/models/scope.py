"""Names of modules in compiled programs: each operation's `op_name` says whose it is.

A module is known by the attribute of the module that calls it, as in `layers/attention/q`, which is
where its parameters are too. Names are metadata: what is compiled stays the same.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Concatenate, ParamSpec, TypeVar

import jax
from flax import nnx

__all__ = ["scoped"]

_caller: ContextVar[nnx.Module | None] = ContextVar("fornax_module", default=None)
"""The module whose scoped method is being traced."""

ModuleT = TypeVar("ModuleT", bound=nnx.Module)
P = ParamSpec("P")
R = TypeVar("R")


def scoped(
    method: Callable[Concatenate[ModuleT, P], R],
) -> Callable[Concatenate[ModuleT, P], R]:
    """Decorate a module's method: its operations are in a `jax.named_scope` of the attribute by
    which the calling module holds it.

    A module adds no name when none calls it, when it calls itself, or when its caller does not hold
    it as an attribute.

    Example:
      >>> class MLP(nnx.Module):
      ...     @scoped
      ...     def __call__(self, x):
      ...         return self.down(self.up(x))  # in `down` and `up`, where these are scoped too
    """

    @functools.wraps(method)
    def run(self: ModuleT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        caller = _caller.get()
        if caller is self:
            return method(self, *args, **kwargs)
        held = () if caller is None else vars(caller).items()
        name = next((name for name, part in held if part is self), None)
        token = _caller.set(self)
        try:
            if name is None:
                return method(self, *args, **kwargs)
            with jax.named_scope(name):
                return method(self, *args, **kwargs)
        finally:
            _caller.reset(token)

    return run
