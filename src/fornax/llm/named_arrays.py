"""Parameters by path, whatever they came in: a module, a state, nested mappings of arrays."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from fornax.config.errors import EngineError

__all__ = ["Flat", "check_same", "flat"]

Flat = dict[tuple[Any, ...], Any]


def flat(params: Any) -> Flat:
    """Path to array of a module, a state, or a nested mapping of arrays."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    if not isinstance(params, Mapping):
        raise EngineError(
            f"weights of type {type(params).__name__} are not known; give a Decoder, its "
            "nnx.State, or nested mappings of its arrays"
        )
    found: Flat = {}
    for key, value in params.items():
        inner = flat(value) if isinstance(value, Mapping) else {(): value}
        found |= {(key, *path): leaf for path, leaf in inner.items()}
    return found


def check_same(wanted: Mapping[tuple[Any, ...], tuple[int, ...]], given: Flat) -> None:
    """Raise EngineError unless the names and shapes are those wanted."""
    names = {path: "/".join(map(str, path)) for path in wanted.keys() | given.keys()}
    problems = [f"missing {names[path]}" for path in wanted.keys() - given.keys()]
    problems += [f"unknown {names[path]}" for path in given.keys() - wanted.keys()]
    problems += [
        f"{names[path]} has shape {tuple(given[path].shape)}, not {wanted[path]}"
        for path in wanted.keys() & given.keys()
        if tuple(given[path].shape) != wanted[path]
    ]
    if problems:
        raise EngineError(
            f"the weights are not this model's: {'; '.join(sorted(problems)[:5])}; give all "
            "parameters under the model's own names"
        )
